"""Bytes that PyTorch's CPU allocator has handed out, as its own profiler records them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile, record_function

BETWEEN = "between forward and backward"


@dataclass(frozen=True)
class Allocated:
    """Of one training step, above what was allocated before it."""

    kept: int
    """After the forward pass."""
    peak: int


def allocated(forward: Callable[[], Callable[[], object]]) -> Allocated:
    """Runs `forward`, which returns the backward pass, and that."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        backward = forward()
        with record_function(BETWEEN):
            pass
        backward()
    results = profiler.profiler.kineto_results
    now = peak = kept = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == BETWEEN:
            kept = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return Allocated(kept, peak)
