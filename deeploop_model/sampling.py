"""Choosing the next token: temperature, then top-k, then top-p, then one draw.

1. temperature t: p = softmax(logits / t); t = 0 takes the most likely token, the lowest id among equals.
2. top-k: only the k most likely tokens, and those as likely as the k-th.
3. top-p: of these, renormalised, the shortest run of most likely tokens whose probabilities add up to p or more
   (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751). One token always remains.

Everything is computed in float64 and drawn by inverting the distribution function at one uniform number, so that the
device does not change what a seed means.

Shape suffixes: B batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deeploop_model.errors import ModelConfigError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Raises ModelConfigError for values without a meaning."""

    temperature: float = 1.0
    """0 for the most likely token, 1 for the model's own distribution."""
    top_k: int | None = None
    """None for all tokens."""
    top_p: float = 1.0
    """1 for all tokens."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ModelConfigError(f"temperature: {self.temperature} must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ModelConfigError(f"top_k: {self.top_k} must be 1 or more")
        if not 0 < self.top_p <= 1:
            raise ModelConfigError(f"top_p: {self.top_p} must be more than 0 and at most 1")


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that tokens are drawn from, [B, V] float64; rows add up to 1."""
    logits_BV = logits_BV.double()
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits_BV.argmax(-1), logits_BV.shape[-1]).double()
    # The largest logit becomes 0 first: divided by a tiny temperature it would be infinite.
    p_BV = ((logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if sampling.top_k is not None and sampling.top_k < p_BV.shape[-1]:
        p_BV = _renormalised(p_BV, p_BV >= p_BV.topk(sampling.top_k).values[:, -1:])
    if sampling.top_p < 1:
        sorted_BV, order_BV = p_BV.sort(descending=True, stable=True)
        # A token stays while those before it fall short of p: the first one always does.
        kept_sorted_BV = sorted_BV.cumsum(-1) - sorted_BV < sampling.top_p
        p_BV = _renormalised(p_BV, torch.zeros_like(kept_sorted_BV).scatter(-1, order_BV, kept_sorted_BV))
    return p_BV


def draw(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Token ids [B], int64: the first id whose cumulative probability exceeds `uniform_B`, numbers in [0, 1)."""
    cumulative_BV = p_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    # Rounding must not carry u * total up to the total, where no id is left.
    target_B1 = torch.minimum(uniform_B.unsqueeze(-1) * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    return torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(-1)


def sample(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """One token per row, int64 [B]; row b takes one number from `generators[b]`, a generator on the CPU.

    With a generator of its own, a sequence is continued alike alone and in any batch.
    """
    uniform_B = torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
    return draw(probabilities(logits_BV, sampling), uniform_B.to(logits_BV.device))


def _renormalised(p_BV: Tensor, kept_BV: Tensor) -> Tensor:
    p_BV = torch.where(kept_BV, p_BV, 0.0)
    return p_BV / p_BV.sum(-1, keepdim=True)
