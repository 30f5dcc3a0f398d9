"""Requests to stop, wherever they arrive: all ranks save after the same step, leave, and go on later bit by bit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

from pretrain import checkpoint_store as store
from pretrain import run
from pretrain.engine import train_step
from pretrain.exit_codes import Exit
from pretrain.stopping import StopRequests
from tests.support.ranks import free_port, run_ranks
from tests.support.runs import CPU_CONFIG, REPOSITORY, optimizer_tensors, run_main, small_tree, write_tree


def test_each_signal_is_noted_and_handlers_come_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        with StopRequests(tmp_path / "STOP", None, is_main=True) as stop:
            assert stop.reason is None
            os.kill(os.getpid(), number)
            assert stop.reason == number.name
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_stop_file_is_seen_by_rank_0_and_deleted_once_obeyed(tmp_path: Path) -> None:
    file = tmp_path / "STOP"
    file.touch()
    with StopRequests(file, None, is_main=False) as other, StopRequests(file, None, is_main=True) as stop:
        assert other.reason is None
        assert stop.reason == f"{file} is there"
        stop.obeyed()
    assert not file.exists()


def test_time_is_over(tmp_path: Path) -> None:
    with StopRequests(tmp_path / "STOP", 1e-9, is_main=False) as stop:
        assert stop.reason == "recovery.stop_after_minutes: 1e-09 are over"
    with StopRequests(tmp_path / "STOP", 1.0, is_main=False) as stop:
        assert stop.reason is None


def signalled_main(config: Path, rank: int, number: int, *overrides: str) -> int:
    """A run in which `rank` gets a signal during step 7."""
    done = 0

    def step(*args: Any) -> torch.Tensor:
        nonlocal done
        done += 1
        if done == 7 and torch.distributed.get_rank() == rank:
            os.kill(os.getpid(), number)
        return train_step(*args)

    with patch.object(run, "train_step", step):
        return run_main(config, *overrides)


def stop_file_in_last_step_main(config: Path, stop_file: Path, steps: int) -> int:
    """A run of `steps` more steps, in the last of which the stop file appears."""
    done = 0

    def step(*args: Any) -> torch.Tensor:
        nonlocal done
        done += 1
        if done == steps:
            stop_file.touch()
        return train_step(*args)

    with patch.object(run, "train_step", step):
        return run_main(config)


def test_a_signal_to_one_rank_saves_all_and_nothing_is_lost(dataset: Path, tmp_path: Path) -> None:
    whole = write_tree(tmp_path / "whole.yaml", small_tree(tmp_path / "whole", dataset, steps=24))
    assert [r.value for r in run_ranks(2, run_main, whole, folder=tmp_path)] == [0, 0]
    out = tmp_path / "out"
    config = write_tree(tmp_path / "run.yaml", small_tree(out, dataset, steps=24))
    for starts, (rank, number) in enumerate(((1, signal.SIGTERM), (0, signal.SIGINT), (1, signal.SIGUSR1)), 1):
        results = run_ranks(2, signalled_main, config, rank, number, folder=tmp_path)
        assert [r.value for r in results] == [Exit.STOPPED] * 2
        assert store.step_of(store.finished(out / "checkpoints")[0]) == 7 * starts
        assert f"stopped after step {7 * starts}: " in results[0].stdout
        assert json.loads((out / "status.json").read_text())["outcome"] == "stopped"
    (out / "STOP").touch()
    assert [r.value for r in run_ranks(2, run_main, config, folder=tmp_path)] == [Exit.STOPPED] * 2
    assert not (out / "STOP").exists()
    left = 24 - store.step_of(store.finished(out / "checkpoints")[0])
    results = run_ranks(2, stop_file_in_last_step_main, config, out / "STOP", left, folder=tmp_path)
    assert [r.value for r in results] == [0, 0]
    assert (out / "DONE").exists()
    assert not (out / "STOP").exists()  # or it would stop a longer run of this folder
    a, b = (optimizer_tensors(folder / "checkpoints/step_00000024") for folder in (tmp_path / "whole", out))
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port"],
}


@pytest.mark.parametrize(
    ("launcher", "whom", "number"),
    [
        ("deepspeed", "command", signal.SIGTERM),
        ("deepspeed", "node launcher", signal.SIGTERM),
        ("deepspeed", "node launcher", signal.SIGKILL),
        ("deepspeed", "terminal", signal.SIGINT),
        ("deepspeed, supervised", "terminal", signal.SIGINT),
        ("torchrun", "command", signal.SIGTERM),
        ("torchrun", "command", signal.SIGKILL),
    ],
)
def test_a_signal_to_the_launcher_saves(
    dataset: Path, tmp_path: Path, launcher: str, whom: str, number: signal.Signals
) -> None:
    """The deepspeed command ends at once and leaves its ranks, as does a launcher that is killed: the ranks notice.

    The others pass the signal on. A terminal's Ctrl-C reaches the launcher and all ranks together, or the supervisor.
    """
    out = tmp_path / "out"
    config = write_tree(tmp_path / "run.yaml", small_tree(out, dataset, steps=100_000, validate_every=0))
    bin_folder = Path(sys.executable).parent
    name, _, supervised = launcher.partition(", ")
    program, *options = LAUNCHERS[name]
    command = [str(bin_folder / program), *options, str(free_port()), "pretrain/run.py"]
    command += ["--ds_config", str(CPU_CONFIG), "--config", str(config), "checkpoint.every=0"]
    if supervised:
        command = [sys.executable, "-m", "pretrain.supervise", "--out", str(out), "--", *command]
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    family: list[psutil.Process] = [psutil.Process(process.pid)]
    try:
        wait_until(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0, 300)
        family += family[0].children(recursive=True)
        start = time.monotonic()
        if whom == "terminal":
            os.killpg(process.pid, number)
        else:
            (family[0] if whom == "command" else family[0].children()[0]).send_signal(number)
        wait_until(lambda: (out / "status.json").exists(), 30)
        print(f"\n{launcher}: {number.name} to the {whom}: saved after {time.monotonic() - start:.1f} s", end="")
        assert json.loads((out / "status.json").read_text())["outcome"] == "stopped"
        [saved] = store.finished(out / "checkpoints")
        store.check_whole(saved)
        exit_code = process.wait(timeout=100)  # before psutil takes it
        psutil.wait_procs(family, timeout=100)  # DeepSpeed gives ranks 30 s to leave
        print(f", all processes gone after {time.monotonic() - start:.1f} s")
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)
        if supervised:
            assert exit_code == Exit.STOPPED
            assert "supervise: SIGINT: asking the run to save and leave" in (tmp_path / "log").read_text()
            assert not (out / "STOP").exists()
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)
