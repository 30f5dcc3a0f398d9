"""Input injection: how the loop's input e comes back into the stream before every round, the first included.

| injection     | before a round                | source                                                           |
|---------------|-------------------------------|------------------------------------------------------------------|
| none          | x                             | DeepLoop                                                         |
| add           | RMSNorm(x + e)                | looped Transformers (Yang et al. 2023, arXiv:2311.12424)         |
| concat-linear | RMSNorm(W [x, e]), W d x 2d   | the adapter of Huginn (Geiping et al. 2025, arXiv:2502.05171)    |

e is what enters the loop: the output of the prelude, or the embedded tokens without one. Where the norm sits after
the visits, every visit expects a stream of unit RMS, so injection ends in a norm of its own; where it sits before
(pre_ln) the stream is never normalised, and neither is this sum.

Injection isn't a residual visit: it adds no branch of weights scaled by beta, so neither N nor M counts it.

Shape suffixes: B batch, T time, D d_model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deeploop_model.config import DeepLoopConfig
from deeploop_model.norm import RMSNorm
from deeploop_model.visit_gradients import Linear


class Injection(nn.Module):
    """x, e -> x with e in it, both [B, T, D] in the stream's precision."""

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__()
        self.linear = Linear(2 * config.d_model, config.d_model) if config.injection == "concat-linear" else None
        self.norm = RMSNorm(config.d_model, config.norm_eps) if config.rule.norm == "after" else None

    def forward(self, x_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        if self.linear is None:
            mixed_BTD = x_BTD + e_BTD
        else:
            both = torch.cat((x_BTD, e_BTD), dim=-1).to(self.linear.weight.dtype)
            mixed_BTD = self.linear(both).to(x_BTD.dtype)
        return mixed_BTD if self.norm is None else self.norm(mixed_BTD)
