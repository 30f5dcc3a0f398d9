"""Saving: training waits for a copy to host memory, a thread of each rank writes it, all ranks publish it together.

`Saver.save`, on all ranks, copies and starts the writing threads. Each rank then tells in every step's agreement
whether its thread is done. When all are, `Saver.conclude`, on all ranks, collects the files' checksums; rank 0 writes
the manifest and gives the folder its name. A fault on any rank makes the whole save fail: it is told, its folder is
deleted, earlier checkpoints stay, and training goes on.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist

from data_prep.durable import fsync_folder
from pretrain import checkpoint_store as store
from pretrain.checkpoint import STATE_FILE, RunState
from pretrain.checkpoint_files import content_bytes, write_file
from pretrain.config import CheckpointConfig
from pretrain.engine import Engine
from pretrain.errors import CheckpointError, SaveError
from pretrain.monitor.run_log import RunLog
from pretrain.ranks import Ranks

Records = dict[str, store.FileRecord]


class Saver:
    """Writes the checkpoints of one engine.

    Args:
        engine: gets its checkpoints from `pretrain.checkpoint_files.HostCopies`.
        root: the run folder's `checkpoints/`, which all ranks see.
        group: a process group over CPU tensors with a timeout that suits the disk.
        log: is told what was saved and what could not be.
    """

    def __init__(
        self,
        engine: Engine,
        root: Path,
        config: CheckpointConfig,
        ranks: Ranks,
        group: dist.ProcessGroup,
        log: RunLog,
    ) -> None:
        self._engine = engine
        self._root = root
        self._config = config
        self._ranks = ranks
        self._group = group
        self._log = log
        self._writing: _Writing | None = None
        self._deleting: Thread | None = None
        self._failures = 0

    @property
    def under_way(self) -> bool:
        """Whether a save has begun that is not concluded."""
        return self._writing is not None

    @property
    def written(self) -> bool:
        """Whether a save is under way whose writing is over on this rank."""
        return self._writing is not None and not self._writing.thread.is_alive()

    def save(self, state: RunState, *, wait: bool) -> None:
        """Starts the save of `state.step`, after an earlier one that is still being written; every rank must call it.

        With `wait`, returns when the checkpoint is published, and raises SaveError where it could not be.
        """
        self.conclude()
        temporary = store.temporary_folder(self._root, state.step)
        # DeepSpeed's barriers and copies; it writes nothing, for HostCopies keeps what it is given.
        self._engine.save_checkpoint(str(self._root), tag=temporary.name, save_latest=False)
        contents = self._engine.checkpoint_engine.take()
        fault = self._prepare(temporary, sum(map(content_bytes, contents.values())))
        if fault is None:
            self._writing = _Writing(state, temporary, contents)
            if wait or not self._config.background:
                fault = self.conclude()
        else:
            self._failed(state.step, temporary, fault)
        if wait:
            self.close()
            if fault is not None:
                raise SaveError(f"the checkpoint of step {state.step} could not be saved: {fault}")

    def conclude(self) -> str | None:
        """Waits for the save under way, if any, and publishes it; every rank must call it.

        Returns why that was not possible, the same on all ranks, or None.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        writing.thread.join()
        found: list[tuple[Records, str | None]] = [({}, None)] * self._ranks.world_size
        dist.all_gather_object(found, (writing.records, writing.fault), group=self._group)
        step, final = writing.state.step, store.step_folder(self._root, writing.state.step)
        fault = next((f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(found) if fault is not None), None)
        if fault is None and self._ranks.is_main:
            files = {name: record for records, _ in found for name, record in records.items()}
            try:
                store.publish(writing.temporary, final, files)
            except OSError as error:
                fault = f"rank 0: {error}"
        fault = self._from_main(fault)
        if fault is not None:
            self._failed(step, writing.temporary, fault)
            return fault
        self._log.say(f"saved {final}")
        if self._ranks.is_main:
            self._delete_old()
        return None

    def close(self) -> None:
        """Waits for deletions."""
        if self._deleting is not None:
            self._deleting.join()

    def _delete_old(self) -> None:
        """Deletes what need not be kept, in a thread: large files take their time."""
        self.close()
        keep = (self._root, self._config.keep_last, self._config.keep_every)
        self._deleting = Thread(target=store.retain, args=keep, name="delete old checkpoints", daemon=True)
        self._deleting.start()

    def _prepare(self, temporary: Path, bytes_here: int) -> str | None:
        """Makes the folder, having looked for room; the same answer on all ranks."""
        sizes: list[Any] = [0] * self._ranks.world_size
        dist.all_gather_object(sizes, bytes_here, group=self._group)
        fault = None
        if self._ranks.is_main:
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                self._root.mkdir(parents=True, exist_ok=True)
                store.require_space(self._root, sum(sizes))
                temporary.mkdir()
            except CheckpointError as error:
                fault = str(error)
            except OSError as error:
                fault = f"{temporary}: cannot be made: {error.strerror}"
        return self._from_main(fault)

    def _from_main(self, fault: str | None) -> str | None:
        """Rank 0's word on all ranks."""
        word = [fault]
        dist.broadcast_object_list(word, src=0, group=self._group)
        return word[0]

    def _failed(self, step: int, temporary: Path, fault: str) -> None:
        self._failures += 1
        if self._ranks.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        told = f"the checkpoint of step {step} could not be saved: {fault}; earlier ones are untouched"
        self._log.event(step, "save_failed", told, {"failed_saves": self._failures}, fault=fault)


class _Writing:
    """One rank's part of a save: its thread, and afterwards either records or a fault."""

    def __init__(self, state: RunState, temporary: Path, contents: dict[str, Any]) -> None:
        self.state = state
        self.temporary = temporary
        self.records: Records = {}
        self.fault: str | None = None
        self._contents = contents
        self.thread = Thread(target=self._write, name=f"save step {state.step}", daemon=True)
        self.thread.start()

    def _write(self) -> None:
        try:
            for name, content in self._contents.items():
                self.records[name] = write_file(self.temporary / name, content)
            if dist.get_rank() == 0:
                text = json.dumps(dataclasses.asdict(self.state), indent=2) + "\n"
                self.records[STATE_FILE] = store.write_text(self.temporary / STATE_FILE, text)
            fsync_folder(self.temporary)
        except OSError as error:
            self.fault = f"{error.filename or self.temporary}: {error.strerror}"
        except Exception as error:  # whatever it is, the other ranks must learn that there is no checkpoint
            self.fault = f"{self.temporary}: {type(error).__name__}: {error}"
        finally:
            self._contents = {}
