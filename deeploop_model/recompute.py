"""Gradient checkpointing across rounds: which states the backward pass keeps and which it computes again.

| policy | kept between forward and backward                           | computed again                            |
|--------|-------------------------------------------------------------|-------------------------------------------|
| none   | every activation of every visit                             | nothing                                   |
| block  | the stream before each block of each round                  | one block at a time                       |
| round  | the stream before each round, the prelude and the coda      | one round, the prelude, the coda at a time |

Only the non-reentrant form exists here: the reentrant one reduces a shared weight's gradient once per visit, which
ZeRO-2 refuses ("Gradient computed twice for this partition").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deeploop_model.errors import ModelConfigError

RecomputePolicy = Literal["none", "block", "round"]
POLICIES: tuple[str, ...] = get_args(RecomputePolicy)

Step = Callable[[Tensor], Tensor]


def recomputed(step: Step) -> Step:
    """The same function of the stream, keeping only its input for the backward pass."""

    def run(x_BTD: Tensor) -> Tensor:
        # No step draws random numbers, so there is no generator state to save and restore.
        result: Tensor = checkpoint(step, x_BTD, use_reentrant=False, preserve_rng_state=False)
        return result

    return run


def under_policy(policy: RecomputePolicy, unit: Literal["block", "round"], step: Step) -> Step:
    """The step of one `unit`, recomputed where the policy says so and there will be a backward pass."""
    return recomputed(step) if policy == unit and torch.is_grad_enabled() else step


def check_policy(policy: str) -> RecomputePolicy:
    """Raises ModelConfigError for a policy that does not exist."""
    if policy not in POLICIES:
        raise ModelConfigError(f"recompute: {policy!r} is unknown; use one of {', '.join(POLICIES)}")
    return policy  # type: ignore[return-value]
