"""What the time of training steps goes on.

On a GPU, forward, backward and optimizer are measured between events on its stream, which costs no waiting; everything
else, and all on a CPU, by the clock of this process. Work beside the steps (validation, checkpoints, measurements)
counts for itself and not for the steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

Item = TypeVar("Item")
ON_DEVICE = ("forward", "backward", "optimizer")


class Spent(NamedTuple):
    """Means over the steps since the last time."""

    step: float
    """Seconds of a step, without the work beside."""
    parts: dict[str, float]
    """Seconds a step by what they went on: parts of the step, then the work beside."""


class StepTimes:
    """Gathers times of this rank."""

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Forgets what was gathered; time counts from here."""
        self._begun = time.perf_counter()
        self._beside_seconds = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Around a part of a step."""
        if self._uses_events and part in ON_DEVICE:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            yield
            end.record()
            self._events.append((part, start, end))
        else:
            begun = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - begun

    @contextmanager
    def beside(self, part: str) -> Iterator[None]:
        """Around work between steps, after which the device has nothing left to do."""
        before = self._seconds[part]
        with self.of(part):
            yield
        self._beside_seconds += self._seconds[part] - before

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, whose making counts as `data`."""
        iterator, end = iter(items), object()
        while True:
            with self.of("data"):
                item = next(iterator, end)
            if item is end:
                return
            yield item  # type: ignore[misc]

    def take(self, steps: int) -> Spent:
        """What `steps` steps spent; starts anew."""
        for part, start, end in self._events:
            end.synchronize()
            self._seconds[part] += start.elapsed_time(end) / 1000
        total = time.perf_counter() - self._begun - self._beside_seconds
        parts = {part: seconds / steps for part, seconds in self._seconds.items()}
        self.restart()
        return Spent(total / steps, parts)
