"""Hangs on real ranks: who writes what, and how soon the job is over."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pretrain import run
from pretrain.config import RecoveryConfig
from pretrain.engine import train_step
from pretrain.exit_codes import Exit
from pretrain.watchdog import Watchdog
from tests.support.ranks import SERVER, free_port
from tests.support.runs import run_main, small_tree, write_tree

FAST = {"hang_factor": 5.0, "hang_min_seconds": 2.0, "heartbeat_seconds": 0.2}


def test_limit_is_a_multiple_of_the_median_of_training_steps(tmp_path: Path) -> None:
    config = RecoveryConfig(hang_factor=10.0, hang_min_seconds=3.0, checkpoint_seconds=1000.0)
    dog = Watchdog(tmp_path, 0, config)
    clock = 0.0
    with patch.object(time, "monotonic", lambda: clock):
        assert dog.limit == 1000.0
        for step in range(1, 8):
            clock += 100.0 if step == 1 else 2.0  # the first step compiles
            dog.step_done(step)
        assert dog.limit == pytest.approx(20.0)
        with dog.other_work("validation"):
            assert dog.limit == 1000.0
            clock += 500.0
        dog.step_done(8)
        assert dog.limit == pytest.approx(20.0)
        for step in range(9, 80):
            clock += 0.01
            dog.step_done(step)
        assert dog.limit == 3.0


def ranks_main(rank: int, port: int, config: Path, hang: str) -> None:
    """One rank's process, which leaves with the run's status; rank 1 hangs in step 12."""
    log = os.open(config.parent / f"rank{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    done = 0

    def step(*args: Any) -> torch.Tensor:
        nonlocal done
        done += 1
        if done == 12 and rank == 1:
            where_it_hangs(hang)
        return train_step(*args)

    with patch.object(run, "train_step", step):
        os._exit(run_main(config))


def where_it_hangs(hang: str) -> None:
    if hang == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif hang == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(1000)


def end_of_ranks(config: Path, hang: str, seconds: float) -> list[int | None]:
    """Exit statuses of two ranks; None for rank 0 if it is there after `seconds`, for rank 1 a moment later."""
    port = free_port()
    ranks = [SERVER.Process(target=ranks_main, args=(rank, port, config, hang)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join(seconds)
    ranks[1].join(10 if hang == "sleeps" else 1)
    statuses = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return statuses


def test_a_hang_makes_every_rank_dump_its_stacks_and_leave(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    values = small_tree(out, dataset, steps=30, validate_every=0)
    config = write_tree(tmp_path / "run.yaml", {**values, "recovery": FAST})
    assert end_of_ranks(config, "sleeps", 90) == [Exit.HUNG, Exit.HUNG]
    stacks = [(out / f"logs/stacks_rank{rank:05}.txt").read_text() for rank in range(2)]
    assert all("no progress for" in text for text in stacks)
    assert "where_it_hangs" in stacks[1]
    assert "where_it_hangs" not in stacks[0]
    assert "train_step" in stacks[0]
    assert "hang: rank 0: step 12, training" in (tmp_path / "rank0.err").read_text()
    for rank in range(2):
        heartbeat = json.loads((out / f"logs/heartbeat_rank{rank:05}.json").read_text())
        assert (heartbeat["rank"], heartbeat["step"], heartbeat["doing"]) == (rank, 11, "training")
        assert abs(time.time() - heartbeat["time"]) < 60


@pytest.mark.parametrize(("hang", "left"), [("stopped", None), ("killed", -signal.SIGKILL)])
def test_the_other_rank_does_not_wait_for_one_that_is_gone(
    dataset: Path, tmp_path: Path, hang: str, left: int | None
) -> None:
    """Stopped: the collective times out after `collective_seconds`. Killed: its connection breaks at once."""
    values = small_tree(tmp_path / "out", dataset, steps=30, validate_every=0)
    config = write_tree(tmp_path / "run.yaml", {**values, "recovery": {"collective_seconds": 4.0}})
    statuses = end_of_ranks(config, hang, 90)
    assert statuses == [Exit.CRASH, left]
    told = (tmp_path / "rank0.err").read_text()
    assert ("Timed out" if hang == "stopped" else "Connection") in told
