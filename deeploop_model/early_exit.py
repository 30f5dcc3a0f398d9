"""Early exit: a token, or a whole sequence, stops looping when a further round changes little.

After each round from the `floor`-th on, a token that still runs is compared with itself one round earlier:

    state   |x_r - x_{r-1}| / |x_{r-1}|         relative change of its stream, Euclidean norm over D
    kl      KL(p_r || p_{r-1}), nats            of the predictions read out after the two rounds

and stops where that is less than the threshold. With threshold 0 nothing stops, which is the full run exactly. The
ceiling is the number of rounds of the pass. With scope `sequence` the largest change among the tokens of the pass
decides for all of them together.

A stopped token keeps its stream. In the rounds that it skips, later tokens see its keys and values of the last round
that it ran, its deepest ones, as with the per-token exits of Geiping et al. 2025 (arXiv:2502.05171). The stopping round
of a token depends on it and earlier tokens only, unless `kl` reads through coda blocks or the scope is `sequence`: then
also on which tokens share its pass.

A batch goes on until all its tokens have stopped: what is saved is time for the batch as a whole, and memory never.

Shape suffixes: B batch, T time, D d_model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deeploop_model.errors import ModelConfigError


@dataclass(frozen=True)
class EarlyExit:
    """When to stop. Raises ModelConfigError for values without a meaning."""

    threshold: float
    """Changes below it stop; a part of the stream's norm, or nats."""
    criterion: Literal["state", "kl"] = "state"
    scope: Literal["token", "sequence"] = "token"
    floor: int = 2
    """Rounds that every token runs at least; a change takes two."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ModelConfigError(f"exit threshold: {self.threshold} must be 0 or more")
        if self.criterion not in ("state", "kl"):
            raise ModelConfigError(f"exit criterion: {self.criterion!r} is unknown; use state or kl")
        if self.scope not in ("token", "sequence"):
            raise ModelConfigError(f"exit scope: {self.scope!r} is unknown; use token or sequence")
        if self.floor < 2:
            raise ModelConfigError(f"exit floor: {self.floor} must be 2 or more: a change takes two rounds")


class ExitMonitor:
    """Decides after every round of one pass which tokens stop.

    Args:
        early_exit: the rule.
        real_BT: False for padding, which never holds a sequence back.
        log_probabilities: [B, T, V] of the predictions after a round, from the stream; only `kl` calls it.
    """

    def __init__(self, early_exit: EarlyExit, real_BT: Tensor, log_probabilities: Callable[[Tensor], Tensor]) -> None:
        self._rule = early_exit
        self._real_BT = real_BT
        self._read = log_probabilities
        self._earlier: Tensor | None = None

    def stopping(self, rounds_done: int, x_BTD: Tensor) -> Tensor:
        """True [B, T] for tokens whose change in round `rounds_done` (from 1) was small enough."""
        rule = self._rule
        if rounds_done < rule.floor - 1:
            return torch.zeros_like(self._real_BT)
        now = x_BTD if rule.criterion == "state" else self._read(x_BTD)
        earlier, self._earlier = self._earlier, now
        if earlier is None:
            return torch.zeros_like(self._real_BT)
        small_BT = (relative_change if rule.criterion == "state" else divergence)(now, earlier) < rule.threshold
        if rule.scope == "sequence":
            small_BT = (small_BT | ~self._real_BT).all(dim=1, keepdim=True).expand_as(small_BT)
        return small_BT


def relative_change(x_BTD: Tensor, earlier_BTD: Tensor) -> Tensor:
    """|x - earlier| / |earlier|, [B, T]."""
    change_BT: Tensor = (x_BTD - earlier_BTD).norm(dim=-1) / earlier_BTD.norm(dim=-1)
    return change_BT


def divergence(log_p_BTV: Tensor, log_q_BTV: Tensor) -> Tensor:
    """KL(p || q) in nats, [B, T]; never below 0, where rounding would carry the sum of two equal distributions."""
    return (log_p_BTV.exp() * (log_p_BTV - log_q_BTV)).sum(-1).clamp(min=0)
