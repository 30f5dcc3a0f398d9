"""The feed-forward branch: GELU, or SwiGLU (Shazeer 2020, arXiv:2002.05202). No biases.

Shape suffixes: B batch, T time, D d_model, F width of the branch.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from deeploop_model.config import DeepLoopConfig
from deeploop_model.visit_gradients import Linear


class FeedForward(nn.Module):
    """down(GELU(up(x))), or down(SiLU(gate(x)) * up(x)) with `feed_forward: swiglu`."""

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__()
        width = config.feed_forward_width
        self.gate = Linear(config.d_model, width) if config.feed_forward == "swiglu" else None
        self.up = Linear(config.d_model, width)
        self.down = Linear(width, config.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        h_BTF = F.gelu(h_BTF, approximate="tanh") if self.gate is None else F.silu(self.gate(x_BTD)) * h_BTF
        return self.down(h_BTF)  # type: ignore[no-any-return]
