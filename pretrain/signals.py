"""The signals that ask a run to stop, and handling them for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Schedulers and launchers send the first, terminals the second, `sbatch --signal=USR1@...` the third."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Sends all of `SIGNALS` to `handler`, and gives them back to whom they went before."""
    former = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in former.items():
            signal.signal(number, earlier)
