"""One block, and the visit that adds a branch to the stream.

Shape suffixes: B batch, T time, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deeploop_model.attention import Attention
from deeploop_model.config import DeepLoopConfig
from deeploop_model.feed_forward import FeedForward
from deeploop_model.kv_cache import CacheSlot
from deeploop_model.norm import RMSNorm
from deeploop_model.residual import ResidualRule
from deeploop_model.sequence import SequenceContext


def visit(x_BTD: Tensor, branch: Callable[[Tensor], Tensor], norm: RMSNorm, rule: ResidualRule) -> Tensor:
    """One residual visit: RMSNorm(alpha*x + f(x)), or x + f(RMSNorm(x)) where the norm sits before.

    The stream keeps its own precision; the branch computes in that of the weights.
    """
    y_BTD = branch(branch_input(x_BTD, norm, rule))
    if rule.norm == "after":
        return norm(torch.add(y_BTD, x_BTD, alpha=rule.alpha))  # type: ignore[no-any-return]
    return x_BTD + y_BTD


def branch_input(x_BTD: Tensor, norm: RMSNorm, rule: ResidualRule) -> Tensor:
    """The stream as a branch reads it, in the precision of the weights."""
    return (x_BTD if rule.norm == "after" else norm(x_BTD)).to(norm.weight.dtype)


class Block(nn.Module):
    """An attention visit, then a feed-forward visit."""

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__()
        self.rule = config.rule
        self.attention = Attention(config)
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)

    def forward(self, x_BTD: Tensor, sequence: SequenceContext, slot: CacheSlot | None = None) -> Tensor:
        x_BTD = visit(x_BTD, lambda h_BTD: self.attention(h_BTD, sequence, slot), self.attention_norm, self.rule)
        return visit(x_BTD, self.feed_forward, self.feed_forward_norm, self.rule)

    def attention_input(self, x_BTD: Tensor) -> Tensor:
        """What the attention of a visit to this stream reads."""
        return branch_input(x_BTD, self.attention_norm, self.rule)
