"""Moments of a training step and of a save at which a rank is killed, by name: SIGKILL from inside, exactly there."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain import checkpoint, checkpoint_files, run, saver
from pretrain import checkpoint_store as store
from pretrain.monitor.run_log import RunLog
from pretrain.saver import Saver

Condition = Callable[[int, tuple[Any, ...]], bool]
"""Of the number of the call, from 1, and its arguments."""


class KillPoint(NamedTuple):
    """SIGKILL to `rank` when it calls, or comes back from, `owner.attribute`."""

    rank: int
    when: str
    """before | after"""
    owner: Any
    attribute: str
    condition: Condition = lambda call, arguments: True

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Nothing happens on other ranks."""
        function, calls = getattr(self.owner, self.attribute), 0

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            here = dist.is_initialized() and dist.get_rank() == self.rank and self.condition(calls, args)
            if here and self.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if here:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        with patch.object(self.owner, self.attribute, deadly):
            yield


def call(number: int) -> Condition:
    return lambda calls, arguments: calls == number


def first_argument_has(part: str) -> Condition:
    """A path that is there with `part` in its name."""
    return lambda calls, arguments: part in Path(arguments[0]).name


def under_way(calls: int, arguments: tuple[Any, ...]) -> bool:
    """Of a method of the saver."""
    return arguments[0].under_way  # type: ignore[no-any-return]


def deleting(part: str, *, old: bool) -> Condition:
    """Of a path that is there with `part` in its name: an old checkpoint's, or what a killed start left."""

    def holds(calls: int, arguments: tuple[Any, ...]) -> bool:
        in_thread = current_thread().name == "delete old checkpoints"
        # Within a folder that is being deleted, names are relative to it.
        return in_thread == old and part in Path(arguments[0]).name and (part != HIDDEN or Path(arguments[0]).exists())

    return holds


HIDDEN = ".dropped."
# A run that saves every 3 steps of two micro-batches begins to save after its third, so that the fifth step is between
# two saves.
STEP_POINTS = {
    "before a step": KillPoint(1, "before", run, "train_step", call(5)),
    "before forward": KillPoint(0, "before", DeepSpeedEngine, "forward", call(9)),
    "after forward": KillPoint(1, "after", DeepSpeedEngine, "forward", call(9)),
    "after backward": KillPoint(0, "after", DeepSpeedEngine, "backward", call(10)),
    "between the micro-batches": KillPoint(1, "after", DeepSpeedEngine, "step", call(9)),
    "after the optimizer's step": KillPoint(0, "after", DeepSpeedEngine, "step", call(10)),
    "before the ranks agree": KillPoint(1, "before", run, "agree", call(5)),
    "after the ranks agreed": KillPoint(0, "after", run, "agree", call(5)),
    "after the step is logged": KillPoint(0, "after", RunLog, "training", call(5)),
}
SAVE_POINTS = {
    "before the copy to host memory": KillPoint(1, "before", Saver, "save", call(1)),
    "after the copy": KillPoint(0, "before", Saver, "_prepare", call(1)),
    "the folder is there": KillPoint(1, "after", Saver, "_prepare", call(1)),
    "before rank 0's first file": KillPoint(0, "before", saver, "write_file", call(1)),
    "within rank 0's first file": KillPoint(0, "after", checkpoint_files._HashedWriter, "write", call(3)),
    "rank 0's first file is whole": KillPoint(0, "after", saver, "write_file", call(1)),
    "within rank 1's file": KillPoint(1, "after", checkpoint_files._HashedWriter, "write", call(3)),
    "rank 1's file is not flushed": KillPoint(1, "before", os, "fsync", call(1)),
    "rank 1's file is whole": KillPoint(1, "after", saver, "write_file", call(1)),
    "before run_state.json": KillPoint(0, "before", store, "write_text"),
    "all files of rank 0 are whole": KillPoint(0, "after", saver, "fsync_folder", call(1)),
    "one rank knows that all is written": KillPoint(1, "before", Saver, "conclude", under_way),
    "before the manifest": KillPoint(0, "before", store, "write_atomic", first_argument_has("manifest")),
    "after the manifest": KillPoint(0, "after", store, "write_atomic", first_argument_has("manifest")),
    "renamed, the rename not flushed": KillPoint(0, "before", store, "fsync_folder", first_argument_has("checkpoints")),
    "published, the other rank not told": KillPoint(0, "after", store, "publish"),
    "before old ones are deleted": KillPoint(0, "before", store, "retain"),
    "an old one is hidden": KillPoint(0, "before", shutil, "rmtree", deleting(HIDDEN, old=True)),
    "within the deletion": KillPoint(0, "after", os, "unlink", deleting(".pt", old=True)),
    "the old one is deleted": KillPoint(0, "after", store, "retain"),
}
START_POINTS = {
    "within the deletion of leftovers": KillPoint(0, "after", os, "unlink", deleting(".pt", old=False)),
    "before the checkpoint is loaded": KillPoint(1, "before", checkpoint, "load"),
    "the checkpoint is loaded": KillPoint(0, "after", checkpoint, "load"),
}
KILL_POINTS = {
    **STEP_POINTS,
    **SAVE_POINTS,
    "again within rank 1's file": SAVE_POINTS["within rank 1's file"],  # leaves something for the next one
    **START_POINTS,
}
