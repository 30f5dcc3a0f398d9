"""When a run is started again, and when not. The commands stand for launchers; the soak test supervises real runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain import checkpoint_store as store
from pretrain import supervise
from pretrain.exit_codes import Exit
from tests.support.runs import REPOSITORY

# Counts its starts and behaves as the start's word of the plan says.
LAUNCHED = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[1]); words = sys.argv[2].split(","); codes = json.loads(sys.argv[3])
count = int((out / "starts").read_text()) if (out / "starts").exists() else 0
(out / "starts").write_text(str(count + 1))
word = words[min(count, len(words) - 1)]
if word == "save":
    folder = out / f"checkpoints/step_{count + 1:08}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
if word == "wait":
    while not (out / "STOP").exists(): time.sleep(0.01)
    (out / "STOP").unlink(); word = "stopped"
if word == "deaf":
    time.sleep(1000)
if word in codes:
    (out / "status.json").write_text(json.dumps({"exit_code": codes[word], "outcome": word}))
    if word == "complete": (out / "DONE").touch()
    sys.exit(1 if word != "complete" else 0)
sys.exit(0 if word == "vanish" else 1)
"""
CODES = json.dumps({one.name.lower(): int(one) for one in Exit})


def supervised(out: Path, plan: str, *flags: str) -> tuple[int, int]:
    """(exit status, starts) of a supervised plan."""
    out.mkdir(exist_ok=True)
    flags = ("--first_pause", "0.01", "--max_failures", "3", *flags)
    command = [sys.executable, "-c", LAUNCHED, str(out), plan, CODES]
    exit_code = supervise.main(["--out", str(out), *flags, "--", *command])
    return exit_code, int((out / "starts").read_text()) if (out / "starts").exists() else 0


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize(
    ("plan", "exit_code", "starts"),
    [
        ("complete", Exit.COMPLETE, 1),
        ("die,save,vanish,complete", Exit.COMPLETE, 4),
        ("die", Exit.NO_PROGRESS, 3),
        ("vanish", Exit.NO_PROGRESS, 3),  # a launcher that was killed may leave with 0
        ("die,die,save,die,die,save,die,die,complete", Exit.COMPLETE, 9),
        ("hung,save_failed,die,complete", Exit.NO_PROGRESS, 3),
        ("die,user_error", Exit.USER_ERROR, 2),
        ("die,diverged", Exit.DIVERGED, 2),
        ("ranks_differ", Exit.RANKS_DIFFER, 1),
        ("stopped", Exit.STOPPED, 1),
    ],
)
def test_starts(tmp_path: Path, plan: str, exit_code: Exit, starts: int) -> None:
    assert supervised(tmp_path / "out", plan) == (exit_code, starts)


def test_nothing_to_do_once_done(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/DONE").touch()
    assert supervised(tmp_path / "out", "die") == (0, 0)


def test_a_signal_to_the_ranks_may_be_no_reason_to_stop(tmp_path: Path) -> None:
    assert supervised(tmp_path / "out", "stopped,complete", "--restart_stopped") == (0, 2)


def test_pauses_double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(supervise.Supervisor, "_sleep", lambda self, seconds: pauses.append(seconds))
    flags = ["--first_pause", "10", "--longest_pause", "35", "--max_failures", "5"]
    assert supervised(tmp_path / "out", "die,die,die,die,save,die,complete", *flags) == (0, 7)
    assert pauses == [10, 20, 35, 35, 0, 10]


@pytest.mark.parametrize("plan", ["wait", "deaf"])
def test_a_signal_asks_the_run_to_save_and_ends_one_that_is_deaf(tmp_path: Path, plan: str) -> None:
    """Under Slurm the job goes back into the queue: a stand-in for scontrol writes down what it was asked."""
    out = tmp_path / "out"
    out.mkdir()
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    command = [sys.executable, "-m", "pretrain.supervise", "--out", str(out), "--grace", "1", "--requeue", "--"]
    command += [sys.executable, "-c", LAUNCHED, str(out), plan, CODES]
    environment = {**os.environ, "PATH": f"{scontrol.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment)
    deadline = time.monotonic() + 60
    while not (out / "starts").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    exit_code = process.wait(timeout=30)
    assert exit_code == Exit.STOPPED
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    assert not (out / "STOP").exists()
    if plan == "wait":
        assert json.loads((out / "status.json").read_text())["outcome"] == "stopped"


def test_progress_is_a_new_checkpoint_even_of_the_same_step(tmp_path: Path) -> None:
    """A damaged newest checkpoint is written again: that is progress, though no step is higher."""
    supervisor = supervise.Supervisor(["true"], tmp_path, supervise.Policy(1, 1.0, 1.0, 1.0, False))
    seen = []
    for _ in range(2):
        temporary = store.temporary_folder(tmp_path / "checkpoints", 5)
        temporary.mkdir(parents=True)
        store.publish(temporary, store.step_folder(tmp_path / "checkpoints", 5), {})
        seen.append(supervisor._published())
        time.sleep(0.01)
    assert seen[1] - seen[0]
