"""Random numbers by (seed, step): what a step draws never depends on the steps before it."""

from __future__ import annotations

import numpy as np
import torch


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 64-bit seed for one step of one rank, by NumPy's SeedSequence hash."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch's default generators, of the CPU and of every device."""
    torch.manual_seed(step_seed(seed, step, rank))
