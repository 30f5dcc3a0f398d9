"""The parts of one block: RMSNorm, attention, feed-forward, and the visit that adds a branch to the stream.

Shape suffixes: B batch, T time, D d_model, H heads, C head_dim, F d_ff.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop_model.config import DeepLoopConfig
from deeploop_model.residual import ResidualRule
from deeploop_model.rotary import RotaryTable, rotate


def stream_dtype(weight: Tensor) -> torch.dtype:
    """The stream's precision: float64 for a float64 model, otherwise float32, whatever the weights are.

    A DeepLoop branch starts at 1/(4N) of the skip. In bf16 (8 significant bits) alpha*x + f(x) would round away most
    of it at N = 8, and all of it at N = 128.
    """
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in the precision of the stream (Zhang and Sennrich 2019)."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight.to(x_BTD.dtype), self.eps)


class Attention(nn.Module):
    """Causal multi-head self-attention without biases."""

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        # One matrix product for query, key and value; the initialiser treats its three row blocks as three matrices.
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor, rotary: RotaryTable) -> Tensor:
        q_BHTC, k_BHTC, v_BHTC = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        y_BHTC = F.scaled_dot_product_attention(rotate(q_BHTC, rotary), rotate(k_BHTC, rotary), v_BHTC, is_causal=True)
        return self.output(y_BHTC.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """GELU feed-forward branch of width 4d without biases."""

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))  # type: ignore[no-any-return]


def visit(x_BTD: Tensor, branch: Callable[[Tensor], Tensor], norm: RMSNorm, rule: ResidualRule) -> Tensor:
    """One residual visit: RMSNorm(alpha*x + f(x)), or x + f(RMSNorm(x)) where the norm sits before.

    The stream keeps its own precision; the branch computes in that of the weights.
    """
    if rule.norm == "after":
        return norm(torch.add(branch(x_BTD.to(norm.weight.dtype)), x_BTD, alpha=rule.alpha))  # type: ignore[no-any-return]
    return x_BTD + branch(norm(x_BTD).to(norm.weight.dtype))


class Block(nn.Module):
    """An attention visit, then a feed-forward visit."""

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__()
        self.rule = config.rule
        self.attention = Attention(config)
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)

    def forward(self, x_BTD: Tensor, rotary: RotaryTable) -> Tensor:
        x_BTD = visit(x_BTD, lambda h_BTD: self.attention(h_BTD, rotary), self.attention_norm, self.rule)
        return visit(x_BTD, self.feed_forward, self.feed_forward_norm, self.rule)
