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


def step_generator(seed: int, step: int, purpose: str) -> np.random.Generator:
    """A generator for what all ranks must draw alike in one step; each purpose has numbers of its own."""
    # PCG64 by name: NumPy may change its default.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, step], spawn_key=tuple(purpose.encode()))))
