"""Requests to save and leave: signals, a stop file, the end of the allowed time, a launcher that is gone.

Each rank only notes what it sees; the ranks agree once a step (`pretrain.agreement`), so that one request is enough
wherever it arrives, and all leave after the same step.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

from pretrain.signals import handling

LAUNCHERS = {"deepspeed.launcher.launch": 2, "torchrun": 1, "torch.distributed.run": 1}
"""What a launcher's command line holds, and how many of the ranks' ancestors are to be there: DeepSpeed's launcher of a
node and the command that started it, but of torchrun not the shell that may have started it."""
LOOK_SECONDS = 1.0


class StopRequests:
    """What asks this process to stop. Use as a context: the signals' former handlers come back at its end.

    Args:
        stop_file: stops the run when it appears; rank 0 looks, and deletes it.
        after_minutes: from now on; None for ever.
    """

    def __init__(self, stop_file: Path, after_minutes: float | None, *, is_main: bool) -> None:
        self._stop_file = stop_file
        self._is_main = is_main
        self._deadline = None if after_minutes is None else time.monotonic() + 60 * after_minutes
        self._minutes = after_minutes
        self._launcher = _launcher()
        self._next_look = 0.0
        self._reason: str | None = None
        self._handling = handling(self._on_signal)

    def __enter__(self) -> StopRequests:
        self._handling.__enter__()
        return self

    def __exit__(self, *unused: object) -> None:
        self._handling.__exit__(None, None, None)

    @property
    def reason(self) -> str | None:
        """Why to stop, or None. Looks at files and processes once a second."""
        now = time.monotonic()
        if self._reason is None and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._reason = self._look(now)
        return self._reason

    def obeyed(self) -> None:
        """The run is saved: the stop file has done its work."""
        if self._is_main:
            self._stop_file.unlink(missing_ok=True)

    def _look(self, now: float) -> str | None:
        if self._is_main and self._stop_file.exists():
            return f"{self._stop_file} is there"
        if self._deadline is not None and now > self._deadline:
            return f"recovery.stop_after_minutes: {self._minutes:g} are over"
        if self._launcher is not None and _ancestors(len(self._launcher)) != self._launcher:
            return "the launcher is gone"
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing is printed here: standard output may be gone with the launcher.
        self._reason = self._reason or signal.Signals(number).name


def _launcher() -> list[int] | None:
    """Process ids of this node's launcher and maybe of what started it; None under a launcher not known here.

    Ending the `deepspeed` command leaves the node's launcher and its ranks running; SIGKILL of the node's launcher
    leaves the ranks. Nobody would wait for them any more.
    """
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return None
    return next((_ancestors(count) for name, count in LAUNCHERS.items() if name.encode() in command), None)


def _ancestors(count: int) -> list[int]:
    """Process ids of the parent, its parent and so on."""
    found = [os.getppid()]
    while len(found) < count:
        try:
            # The command's name stands in parentheses and may hold anything.
            fields = Path(f"/proc/{found[-1]}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        except OSError:
            break
        found.append(int(fields.split()[1]))
    return found
