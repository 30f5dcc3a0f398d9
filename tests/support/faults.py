"""Faults for a run that goes on in other processes: dead ranks, damaged checkpoints, a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain import checkpoint_store as store
from pretrain.errors import CheckpointError


class RunGone(Exception):  # noqa: N818
    """The run came to its end while a fault was being prepared."""


class Faults:
    """Finds the run's processes by their heartbeats and its checkpoints by their folder.

    Args:
        out: the run folder.
        over: says whether the supervisor has ended.
        seed: of all random choices.
    """

    def __init__(self, out: Path, over: Callable[[], bool], seed: int) -> None:
        self._out = out
        self._over = over
        self._random = random.Random(seed)
        self._dead: set[int] = set()
        self.counts: dict[str, int] = {}
        self._kinds: list[tuple[str, Callable[[], bool]]] = [
            ("SIGKILL to a rank", self.kill_a_rank),
            ("SIGKILL during a save", self.kill_during_a_save),
            ("SIGTERM to a rank", self.terminate_a_rank),
            ("checkpoint file cut", lambda: self.damage_and_kill(self._cut)),
            ("checkpoint bit flipped", lambda: self.damage_and_kill(self._flip)),
            ("checkpoint file deleted", lambda: self.damage_and_kill(Path.unlink)),
            ("disk full during saves", self.fill_the_disk),
        ]

    def inject(self, number: int) -> None:
        """The next kind in turn; where a checkpoint is damaged, a rank is killed as well. Raises RunGone."""
        name, fault = self._kinds[number % len(self._kinds)]
        while not fault():
            self._wait_until(lambda: True)
        for one in (name, "SIGKILL to a rank") if name.startswith("checkpoint") else (name,):
            self.counts[one] = self.counts.get(one, 0) + 1

    @property
    def count(self) -> int:
        """Faults so far."""
        return sum(self.counts.values())

    def wait_for_step(self, step: int) -> None:
        """Until the run is past `step`, or has been for long: faults throw it back. Raises RunGone."""
        self._wait_until(lambda: len(self._living()) == 2 and min(s for s, _ in self._living()) >= step)

    def kill_a_rank(self) -> bool:
        return self._signal(signal.SIGKILL)

    def terminate_a_rank(self) -> bool:
        return self._signal(signal.SIGTERM)

    def kill_during_a_save(self) -> bool:
        self._wait_until(lambda: bool(self._living()) and any((self._out / "checkpoints").glob(".step_*.tmp")))
        time.sleep(self._random.uniform(0, 0.01))
        return self._signal(signal.SIGKILL)

    def damage_and_kill(self, damage: Callable[[Path], None]) -> bool:
        """Damages a file of the newest checkpoint if an older one is whole; a dead run's next start must see it."""
        if not self._signal(signal.SIGKILL):
            return False
        time.sleep(0.3)  # the other rank notices
        folders = store.finished(self._out / "checkpoints")
        whole = [folder for folder in folders if _is_whole(folder)]
        if len(whole) < 2:
            return False
        with contextlib.suppress(OSError):  # deleted meanwhile
            damage(self._random.choice(sorted(path for path in whole[0].iterdir() if path.is_file())))
            return True
        return False

    def fill_the_disk(self) -> bool:
        """Until a save has failed."""
        ballast = self._out.parent / "ballast"
        failed = self._failed_saves()
        try:
            with contextlib.suppress(OSError), ballast.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            self._wait_until(lambda: self._failed_saves() > failed, seconds=30)
        except TimeoutError:
            return False
        finally:
            ballast.unlink()
        return True

    def _failed_saves(self) -> int:
        return (self._out.parent.parent / "log").read_text(errors="replace").count("could not be saved")

    def _signal(self, number: signal.Signals) -> bool:
        living = self._living()
        if len(living) < 2:
            return False
        _, pid = self._random.choice(living)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self._dead |= {pid for _, pid in living}  # all of them leave
            return True
        return False

    def _living(self) -> list[tuple[int, int]]:
        """(step, process id) of the ranks that are training."""
        found = []
        for path in sorted((self._out / "logs").glob("heartbeat_rank*.json")):
            with contextlib.suppress(OSError, ValueError):
                heartbeat = json.loads(path.read_text())
                if heartbeat["pid"] not in self._dead and Path(f"/proc/{heartbeat['pid']}").exists():
                    found.append((heartbeat["step"], heartbeat["pid"]))
        return found

    def _wait_until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while True:
            if self._over():
                raise RunGone
            if time.monotonic() > deadline:
                raise TimeoutError
            if condition():
                return
            time.sleep(0.002)

    def _cut(self, path: Path) -> None:
        size = path.stat().st_size
        os.truncate(path, self._random.randrange(size))

    def _flip(self, path: Path) -> None:
        position = self._random.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(position)
            [byte] = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 1 << self._random.randrange(8)]))


def _is_whole(folder: Path) -> bool:
    try:
        store.check_whole(folder)
    except CheckpointError:
        return False
    return True


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """Mounts a tmpfs on `folder`; False where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
