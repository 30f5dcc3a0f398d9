"""The processes of a run: who this one is, the process group, and errors that all of them must share."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pretrain.errors import USER_ERRORS, PretrainError, exit_code_of
from pretrain.exit_codes import Exit

ENDING_SECONDS = 5.0
"""That long a rank with an error waits for collectives that are under way."""

_errors: list[BaseException] = []
"""Kept with their frames, and so with the process groups there: letting go of a group waits for its collectives."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among all. Launchers (deepspeed, torchrun, mpirun) tell it through the environment."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """One rank of one where no launcher set anything."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The accelerator of this rank, or the CPU."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def process_group(ranks: Ranks, timeout: float = 600.0) -> Iterator[None]:
    """Starts DeepSpeed's communication and ends it. Leaving without ending it aborts some runs at exit.

    A collective that waits longer than `timeout` seconds for another rank fails. Ending waits for what is under way,
    and so, after an error, for ranks that will never come: then it is given `ENDING_SECONDS`; see `end_process`.
    """
    import deepspeed

    limit = timedelta(seconds=timeout)
    # ZeRO makes groups without a timeout; they take torch's default, half an hour, from here.
    defaults: dict[str, Any] = distributed_c10d.__dict__
    defaults["default_pg_timeout"] = defaults["default_pg_nccl_timeout"] = limit

    if ranks.world_size == 1:
        _stand_alone()
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    else:
        _skip_shared_memory_extension()
    deepspeed.init_distributed(verbose=False, timeout=limit)
    try:
        yield
    except BaseException as error:
        _errors.append(error)
        ending = Thread(target=dist.destroy_process_group, name="end the process group", daemon=True)
        ending.start()
        ending.join(ENDING_SECONDS)
        raise
    dist.destroy_process_group()


def end_process(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and ends the process with what it returns, after an error at once: threads of collectives that
    nobody will finish would hold it up, and the other ranks learn of its end by it.
    """
    try:
        status = main()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        status = int(Exit.CRASH)
    if status in (Exit.COMPLETE, Exit.STOPPED):
        sys.exit(status)
    with contextlib.suppress(OSError):  # the launcher may be gone, and a pipe with it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def patient_group(timeout: float) -> dist.ProcessGroup:
    """All ranks, over CPU tensors: for what waits for disks, up to `timeout` seconds. Every rank must call it."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def together() -> Iterator[None]:
    """Runs the body on every rank; a user error on one becomes the same error on all, so that none waits for ever."""
    fault: tuple[str, Exit] | None = None
    try:
        yield
    except USER_ERRORS as error:
        fault = str(error), exit_code_of(error)
    faults: list[tuple[str, Exit] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for rank, found in enumerate(faults):
        if found is not None:
            shared = PretrainError(found[0] if faults[0] == found else f"rank {rank}: {found[0]}")
            shared.exit_code = found[1]
            raise shared


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a scalar over all ranks, summed in float64."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return float(total.item()) / dist.get_world_size()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The elementwise sum of a tensor over all ranks."""
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def _stand_alone() -> None:
    """Lets one process be a process group of one without a launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        os.environ.setdefault(name, value)


def _skip_shared_memory_extension() -> None:
    """Training on CPU ranks never calls DeepSpeed's shared-memory all-reduce, which takes half a minute to compile."""
    import deepspeed.ops

    registry: dict[str, Any] = deepspeed.ops.__dict__
    registry["__compatible_ops__"] = {**registry.get("__compatible_ops__", {}), "deepspeed_shm_comm": False}
