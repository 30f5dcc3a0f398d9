"""How far the gradients of a weight's visits point the same way: kappa_R, measured while training.

    kappa_R = |sum_r g_r|^2 / sum_r |g_r|^2

with g_r the gradient of one sub-layer's matrices (attention, or feed-forward, of one block) from its visit in round
r. 1 for gradients at right angles, R for equal ones, 0 where they cancel. The stability number of a residual rule is
M * kappa_R * (beta/alpha)^2: updates change the output by a bounded amount where it stays of order 1.

Each backward pass gives both sums for its own tokens. Over micro-batches and ranks they are added up, above and below
the line: kappa_R of gradients at the size of a micro-batch, weighted by their squares. It is none of the global
batch's gradients, whose g_r no rank ever holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deeploop_model.blocks import Block
from deeploop_model.config import DeepLoopConfig
from deeploop_model.model import DeepLoopModel
from deeploop_model.visit_gradients import Linear, VisitNorms

SUB_LAYERS = ("attention", "feed_forward")


class Alignment(NamedTuple):
    """Of one sub-layer of one block."""

    kappa: float
    stability: float
    """M * kappa * (beta/alpha)^2."""


@dataclass(frozen=True)
class VisitAlignment:
    """What the backward passes since `measured_visits` began have told."""

    config: DeepLoopConfig
    norms: dict[str, list[VisitNorms]]
    """By sub-layer, as in `blocks.0.attention`; one of each matrix that learns."""

    def squares(self, device: torch.device | None = None) -> Tensor:
        """float64 [2, sub-layers]: sums of |sum_r g_r|^2 and of |g_r|^2. They add up over ranks."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        rows = [
            [sum((n.of_sums for n in norms if n.of_sums is not None), zero) for norms in self.norms.values()],
            [sum((n.of_visits for n in norms if n.of_visits is not None), zero) for norms in self.norms.values()],
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def of(self, squares: Tensor) -> dict[str, Alignment]:
        """By sub-layer; those without a gradient are left out."""
        rule, num_visits = self.config.rule, self.config.num_visits
        found = {}
        for name, of_sums, of_visits in zip(self.norms, *squares.tolist(), strict=True):
            if of_visits > 0:
                kappa = of_sums / of_visits
                found[name] = Alignment(kappa, num_visits * kappa * (rule.beta / rule.alpha) ** 2)
        return found


@contextmanager
def measured_visits(model: DeepLoopModel) -> Iterator[VisitAlignment]:
    """Measures the looped blocks in all passes that begin in the body. It costs a norm per visit and matrix."""
    measured: list[Linear] = []
    norms: dict[str, list[VisitNorms]] = {}
    for k, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for name in SUB_LAYERS:
            matrices = [m for m in getattr(block, name).modules() if isinstance(m, Linear) and m.weight.requires_grad]
            for matrix in matrices:
                matrix.visited.norms = VisitNorms()
            norms[f"blocks.{k}.{name}"] = [m.visited.norms for m in matrices if m.visited.norms is not None]
            measured += matrices
    try:
        yield VisitAlignment(model.config, norms)
    finally:
        for matrix in measured:
            matrix.visited.norms = None
