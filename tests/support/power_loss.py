"""What a kill or a power cut would leave on disk, at every moment at which a program asks for durability."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """Keeps, while a program works below `root`, two states of it for each call of fsync and rename.

    kill-N   what is in files when the N-th call begins: a process that is killed there leaves it
    power-N  what POSIX promises to survive a power cut there: of a file what it held at its last fsync, of a folder
             the entries that it had at its last fsync
    """

    def __init__(self, root: Path, states: Path) -> None:
        self._root = root
        self._states = states
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, tuple[int, bool]]] = {}
        self._pinned: list[int] = []  # open descriptors, so that no inode number is used again
        self.events = 0

    def _before(self) -> None:
        shutil.copytree(self._root, self._states / f"kill-{self.events:03}")
        self._write(self._root.stat().st_ino, self._states / f"power-{self.events:03}")
        self.events += 1

    def _write(self, folder: int, target: Path) -> None:
        target.mkdir()
        for name, (inode, is_folder) in self._entries.get(folder, {}).items():
            if is_folder:
                self._write(inode, target / name)
            else:
                (target / name).write_bytes(self._contents.get(inode, b""))

    def _synced(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            with os.scandir(path) as entries:
                self._entries[inode] = {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}
        else:
            self._contents[inode] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            self._pinned.append(os.dup(descriptor))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches this process; its fsync itself is left out, for the sake of time."""
        replace = os.replace

        def fsync(descriptor: int) -> None:
            self._before()
            self._synced(descriptor)

        def watched_replace(source: Path, target: Path) -> None:
            self._before()
            replace(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            patch.setattr(os, "replace", watched_replace)
            yield
        for descriptor in self._pinned:
            os.close(descriptor)
