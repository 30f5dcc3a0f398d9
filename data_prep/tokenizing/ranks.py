"""Several processes on one output folder: who does what, and how they wait for each other.

Started by `torchrun`, `deepspeed`, `srun` or `mpirun`, each process takes every WORLD_SIZE-th shard; process 0 also
merges. They share nothing but the output folder.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from data_prep.durable import write_atomic
from data_prep.errors import DataError

_POLL_SECONDS = 0.2
# (rank, world size, processes on this machine), first found wins; the third may be absent
_LAUNCHERS = [
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun
    ("RANK", "WORLD_SIZE", "LOCAL_SIZE"),  # deepspeed
    # Of srun's own step: a batch script that starts no step has SLURM_PROCID=0 and SLURM_NTASKS=n, but is alone.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
]


@dataclass(frozen=True)
class Rank:
    """This process among those started together."""

    rank: int = 0
    world_size: int = 1
    processes_here: int = 1


def find_rank(environment: Mapping[str, str]) -> Rank:
    """Reads the launcher's variables; a process started by none is alone.

    Raises:
        DataError: they are not numbers that fit together.
    """
    found = [keys for keys in _LAUNCHERS if keys[0] in environment and keys[1] in environment]
    if not found:
        return Rank()
    keys = next((keys for keys in found if keys[0] == found[0][0] and keys[2] in environment), found[0])
    values = {key: environment[key] for key in keys if key in environment}
    try:
        # SLURM writes "2(x3),1" for three nodes of two processes and one of one.
        rank, size, *here = (int(value.partition("(")[0].partition(",")[0]) for value in values.values())
    except ValueError as error:
        raise DataError(f"in the environment: {values} ({error})") from error
    if not 0 <= rank < size:
        raise DataError(f"in the environment: {values}; expected 0 <= {keys[0]} < {keys[1]}")
    return Rank(rank, size, max([1, *here]))


class Meeting:
    """The ranks' common folder: locks, failure notes and waiting."""

    def __init__(self, folder: Path, rank: Rank) -> None:
        self._folder = folder
        self._rank = rank
        self._lock_path = folder / f"rank-{rank.rank:05}.lock"
        self._lock = self._lock_path.open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{folder.parent}: another tokenize process is at work on this folder; wait for it or stop it"
            ) from error
        os.utime(self._lock_path)
        self._failure_path.unlink(missing_ok=True)

    @property
    def _failure_path(self) -> Path:
        return self._folder / f"rank-{self._rank.rank:05}.failed"

    def report_failure(self, message: str) -> None:
        """Leaves word for ranks that wait."""
        write_atomic(self._failure_path, message.encode())

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Polls the shared folder until `ready`.

        Raises:
            DataError: another rank has failed since this one began.
        """
        while not ready():
            # Both times are the file server's.
            begun = self._lock_path.stat().st_mtime
            for note in self._folder.glob("rank-*.failed"):
                if note.stat().st_mtime >= begun:
                    raise DataError(f"{what}: {note.stem} failed: {note.read_text()}")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Gives the lock back."""
        self._lock.close()
