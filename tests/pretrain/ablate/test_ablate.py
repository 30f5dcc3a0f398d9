"""A tiny study, really trained: undisturbed, and stopped, killed and orphaned on the way to the same table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pretrain.ablate.__main__ import main
from pretrain.ablate.folder import State, state_of
from pretrain.ablate.plan import plan
from pretrain.ablate.study_file import load_study
from pretrain.exit_codes import Exit
from tests.support.runs import CPU_CONFIG, REPOSITORY, metrics, small_tree, write_tree

TABLES = ("table.md", "table.csv")
GOOD, WILD = "deeploop_R2_lr=0.01_seed0", "deeploop_R2_lr=1e+38_seed0"
WAIT_SECONDS = 300.0


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory, study_data: Path) -> dict[str, Path]:
    """The same study in two folders: a run that learns, and one that cannot."""
    folder = tmp_path_factory.mktemp("studies")
    run = small_tree(folder / "unused", study_data, steps=150, validate_every=75)
    run["checkpoint"] = {"every": 15, "background": False}
    base = write_tree(folder / "base.yaml", run)
    tree: dict[str, Any] = {"base": str(base), "ds_config": str(CPU_CONFIG)}
    tree["grids"] = {"rates": {"axes": {"residual": ["deeploop"], "optimizer.lr": [1e-2, 1e38]}}}
    return {
        name: write_tree(folder / f"{name}.yaml", {**tree, "out": str(folder / name)})
        for name in ("undisturbed", "disturbed")
    }


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def started(study: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "pretrain.ablate", str(study)], cwd=REPOSITORY, stdout=subprocess.DEVNULL
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def checkpoint_step(run: Path) -> int:
    return max((int(path.parent.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*/manifest.json")),
               default=0)  # fmt: skip


def test_a_study_that_is_stopped_and_killed_gives_the_same_table(studies: dict[str, Path]) -> None:
    assert main([str(studies["undisturbed"])]) == Exit.COMPLETE
    whole, parts = studies["undisturbed"].with_suffix(""), studies["disturbed"].with_suffix("")
    run = parts / "rates" / GOOD

    # Ctrl-C: the run under way is saved, the study ends.
    driver = started(studies["disturbed"])
    wait_for(lambda: checkpoint_step(run) >= 10)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(WAIT_SECONDS) == Exit.STOPPED
    stopped_at = checkpoint_step(run)
    assert 10 <= stopped_at < 150
    assert json.loads((run / "status.json").read_text())["exit_code"] == Exit.STOPPED

    # SIGKILL of the study and of the run.
    driver = started(studies["disturbed"])
    wait_for(lambda: checkpoint_step(run) > stopped_at)
    children = psutil.Process(driver.pid).children(recursive=True)
    for process in (driver, *children):
        os.kill(process.pid, signal.SIGKILL)
    driver.wait()
    assert checkpoint_step(run) < 150

    # SIGKILL of the study alone: its run goes on, and the next study waits for it instead of starting a second one.
    driver = started(studies["disturbed"])
    wait_for(lambda: len(psutil.Process(driver.pid).children()) == 1)
    (orphan,) = psutil.Process(driver.pid).children()
    driver.kill()
    driver.wait()
    assert orphan.is_running()
    assert main([str(studies["disturbed"])]) == Exit.COMPLETE
    assert not orphan.is_running()

    for name in TABLES:
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert metrics(whole / "rates" / GOOD) == metrics(run)


def test_a_diverged_run_is_a_result_and_nothing_is_trained_again(
    studies: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = studies["undisturbed"].with_suffix("")
    runs = {run.name: run for run in plan(load_study(studies["undisturbed"]), [])}
    assert state_of(runs[WILD]) is State.GAVE_UP
    table = (out / "table.md").read_text()
    assert "| deeploop, lr 1e+38 | 1 of 1 diverged" in table
    last = [line["val_loss"] for line in metrics(out / "rates" / GOOD) if "val_loss" in line][-1]
    assert f"| deeploop, lr 0.01 | {last:.4f} |" in table
    # What the plan says of FLOPs is what the run counted.
    assert metrics(out / "rates" / GOOD)[-2]["flops"] == runs[GOOD].flops
    assert (out / "rates-loss-by-lr.png").exists()

    before = {path: path.stat().st_mtime_ns for path in out.glob("rates/*/*.jsonl")}
    assert main([str(studies["undisturbed"])]) == Exit.COMPLETE
    assert {path: path.stat().st_mtime_ns for path in out.glob("rates/*/*.jsonl")} == before
    assert "starts" not in capsys.readouterr().err


def test_listing_and_index(
    studies: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = str(studies["undisturbed"])
    assert main([study, "--list"]) == Exit.COMPLETE
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["0", f"rates/{GOOD}"]
    assert "complete, validation loss" in lines[1]
    assert lines[2].endswith("gave up")
    assert lines[3].startswith("2 runs, ")

    assert main([study, "--index", "1"]) == Exit.COMPLETE
    assert f"[1/1] rates/{WILD}: gave up" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert main([study]) == Exit.COMPLETE
    assert f"[1/1] rates/{GOOD}: complete" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert main([study]) == Exit.USER_ERROR
    assert "SLURM_ARRAY_TASK_ID: 2: the study's runs are 0 to 1" in capsys.readouterr().err


def test_results_of_other_settings_are_not_taken_for_this_studys(
    studies: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    study = str(studies["undisturbed"])
    assert main([study, "--table", "monitor.log_every=3", "checkpoint.every=5"]) == Exit.COMPLETE
    assert main([study, "--table", "train.steps=151"]) == Exit.USER_ERROR
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{GOOD}/config.yaml: train.steps is 150 there and 151 in the study; delete the run's folder" in error
