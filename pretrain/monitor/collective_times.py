"""How long DeepSpeed's collectives take, each of them run alone.

With communication and computation overlapped, the time that a step spends on collectives is no property of the step.
This measures what they would take by themselves: DeepSpeed's wrapper around every collective times it and waits for it
once a logger asks for that. Its own logger also computes bandwidths, and ends the process at a collective it has no
formula for, so a smaller one stands in for the length of one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CollectiveTimes:
    """What DeepSpeed's wrapper asks of a logger: the switches that it reads, and `append`."""

    enabled = True
    prof_all = True
    prof_ops = ()
    debug = False

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0

    def append(self, raw_name: str, record_name: str, milliseconds: float, num_bytes: int) -> None:
        from deepspeed.comm.comm import timers

        self.seconds += milliseconds / 1000
        self.count += 1
        timers(record_name).reset()  # else the next one of this name is told as the sum of all so far


@contextmanager
def timed_collectives() -> Iterator[CollectiveTimes]:
    """Times the collectives that DeepSpeed runs in the body on this rank."""
    from deepspeed.comm import comm

    module: dict[str, Any] = comm.__dict__
    usual, times = module["comms_logger"], CollectiveTimes()
    module["comms_logger"] = times
    try:
        yield times
    finally:
        module["comms_logger"] = usual
