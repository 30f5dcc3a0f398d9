"""Heartbeats, and an end for steps that never end.

A thread of each rank writes `logs/heartbeat_rank00000.json` and compares the time since the last sign of progress with
a limit: `hang_factor` times the median step, at least `hang_min_seconds`, for training steps; `checkpoint_seconds`
for everything else (the first step, which may compile; validation; checkpoints). Past it, the thread writes the Python
stacks of all threads to `logs/stacks_rank00000.txt` and ends the process with Exit.HUNG. As ranks wait for each other
in every step, all of them get there within a moment, and each leaves its stacks before any leaves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

from pretrain.config import RecoveryConfig
from pretrain.exit_codes import Exit

REMEMBERED_STEPS = 64
STEPS_BEFORE_JUDGING = 5
GRACE_SECONDS = 3.0
"""Between writing the stacks and leaving, in which the other ranks write theirs."""


class Watchdog:
    """Watches this rank's progress while it is entered as a context."""

    def __init__(self, logs: Path, rank: int, config: RecoveryConfig) -> None:
        self._heartbeat = logs / f"heartbeat_rank{rank:05d}.json"
        self._stacks = logs / f"stacks_rank{rank:05d}.txt"
        self._rank = rank
        self._config = config
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._last = time.monotonic()
        self._step = 0
        self._doing = "starting"
        self._over = Event()
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._over.set()
        self._thread.join()

    def step_done(self, step: int) -> int:
        """Call after each training step, with the number of steps done, which is returned."""
        now = time.monotonic()
        if self._doing == "training":
            self._seconds.append(now - self._last)
        self._step, self._last, self._doing = step, now, "training"
        return step

    @contextlib.contextmanager
    def other_work(self, what: str) -> Iterator[None]:
        """Around what is no training step and may take `checkpoint_seconds`."""
        self._doing, self._last = what, time.monotonic()
        yield
        self._doing, self._last = "training", time.monotonic()

    @property
    def limit(self) -> float:
        """Seconds that what is being done now may take."""
        if self._doing != "training" or len(self._seconds) < STEPS_BEFORE_JUDGING:
            return self._config.checkpoint_seconds
        return max(self._config.hang_factor * statistics.median(self._seconds), self._config.hang_min_seconds)

    def _watch(self) -> None:
        beat_at = 0.0
        while not self._over.wait(min(1.0, self._config.heartbeat_seconds)):
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + self._config.heartbeat_seconds
                self._beat()
            waited, limit = now - self._last, self.limit
            if waited > limit:
                self._end(waited, limit)

    def _beat(self) -> None:
        content = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self._step,
            "doing": self._doing,
            "time": time.time(),
        }
        with contextlib.suppress(OSError):  # a full disk is no reason to stop
            temporary = self._heartbeat.with_suffix(".tmp")
            temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
            temporary.replace(self._heartbeat)

    def _end(self, waited: float, limit: float) -> None:
        line = (
            f"hang: rank {self._rank}: step {self._step + 1}, {self._doing}: no progress for {waited:.0f} s, "
            f"the limit is {limit:.0f} s; stacks in {self._stacks}\n"
        )
        with contextlib.suppress(OSError), self._stacks.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        with contextlib.suppress(OSError):
            sys.stderr.write(line)
            sys.stderr.flush()
        time.sleep(GRACE_SECONDS)
        os._exit(Exit.HUNG)
