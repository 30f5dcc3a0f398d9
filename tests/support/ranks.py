"""Real ranks over gloo for tests: processes forked from a server that has imported torch and DeepSpeed once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

SERVER: ForkServerContext = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "torch",
        "deepspeed",
        "pretrain.run",
        # What building a model and an engine imports as well: most of the time that a rank would take to start.
        "torch._dynamo",
        "torch.utils.tensorboard",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ]
)


class RankResult(NamedTuple):
    """What one rank's function returned, and all that it wrote to its standard streams."""

    value: Any
    stdout: str
    stderr: str


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, folder: Path, timeout: float = 600
) -> list[RankResult]:
    """Calls `function(*args)` on every rank with a launcher's environment; [world_size] results.

    The function must be importable. Raises AssertionError with the rank's output where one fails or hangs.
    """
    port = free_port()
    ranks = []
    for rank in range(world_size):
        receiver, sender = SERVER.Pipe(duplex=False)
        log = folder / f"rank{rank}"
        process = SERVER.Process(target=_rank_main, args=(sender, rank, world_size, port, log, function, args))
        process.start()
        sender.close()
        ranks.append((process, receiver, log))
    results = []
    try:
        for rank, (_, receiver, log) in enumerate(ranks):
            if not receiver.poll(timeout):
                raise AssertionError(f"rank {rank} did not finish in {timeout} s:\n{_tail(log)}")
            try:
                ok, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died:\n{_tail(log)}") from None
            assert ok, f"rank {rank} failed:\n{value}\n{_tail(log)}"
            results.append(RankResult(value, _read(log, "out"), _read(log, "err")))
    finally:
        for process, _, _ in ranks:
            process.join(timeout=20 if len(results) == world_size else 0)
            process.kill()
    return results


def exit_statuses(
    world_size: int, function: Callable[..., int], *args: Any, folder: Path, timeout: float = 120
) -> list[int | None]:
    """Calls `function(*args)` on every rank, whose process leaves with what it returns, or dies on the way.

    Returns [world_size] exit statuses; None for a process that had to be ended after `timeout` seconds.
    """
    port = free_port()
    ranks = [
        SERVER.Process(target=_leave_with, args=(rank, world_size, port, folder / f"rank{rank}", function, args))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return statuses


def _leave_with(
    rank: int, world_size: int, port: int, log: Path, function: Callable[..., int], args: tuple[Any]
) -> None:
    become_rank(rank, world_size, port, _truncated(f"{log}.out"), _truncated(f"{log}.err"))
    status = 1
    try:
        status = function(*args)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _rank_main(
    sender: Connection, rank: int, world_size: int, port: int, log: Path, function: Callable[..., Any], args: tuple[Any]
) -> None:
    become_rank(rank, world_size, port, _truncated(f"{log}.out"), _truncated(f"{log}.err"))
    try:
        result = (True, function(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(pickle.dumps(result))  # by value: torch's own way passes file descriptors of a live process
    sender.close()


def become_rank(rank: int, world_size: int, port: int, out: int, err: int) -> None:
    """Gives this process a launcher's environment, one thread, and files for its standard streams."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)


def _truncated(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(log: Path, suffix: str) -> str:
    return Path(f"{log}.{suffix}").read_text(encoding="utf-8", errors="replace")


def _tail(log: Path) -> str:
    return "\n".join(_read(log, suffix)[-3000:] for suffix in ("out", "err") if Path(f"{log}.{suffix}").exists())
