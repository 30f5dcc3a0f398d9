"""A supervised run under a hail of faults ends with the weights of an undisturbed one, bit by bit.

`pytest tests/pretrain/test_soak.py --faults 300 -s` for a long one; the count is printed at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain import checkpoint_store as store
from tests.support.faults import Faults, RunGone, small_disk
from tests.support.launch import Launches
from tests.support.ranks import run_ranks
from tests.support.runs import CPU_CONFIG, REPOSITORY, metrics, optimizer_tensors, run_main, small_tree, write_tree

STEPS = 200


def soak_tree(out: Path, dataset: Path, steps: int) -> dict[str, Any]:
    values = small_tree(out, dataset, steps=steps, validate_every=0)
    values["checkpoint"] = {"every": 4, "keep_last": 4}
    values["recovery"] = {"heartbeat_seconds": 0.02, "collective_seconds": 60.0}
    return values


def test_soak(dataset: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    wanted: int = request.config.getoption("--faults")
    steps = max(STEPS, STEPS * wanted // 40)
    config = write_tree(tmp_path / "undisturbed.yaml", soak_tree(tmp_path / "undisturbed", dataset, steps))
    assert [r.value for r in run_ranks(2, run_main, config, folder=tmp_path)] == [0, 0]

    with small_disk(tmp_path / "disk", megabytes=100) as mounted, Launches(tmp_path) as launches:
        assert mounted, "mounting a tmpfs is not permitted here"
        out = tmp_path / "disk" / "out"
        config = write_tree(tmp_path / "run.yaml", soak_tree(out, dataset, steps))
        run = [sys.executable, "-m", "tests.support.launch", launches.address, "2", "--"]
        run += ["--config", str(config), "--ds_config", str(CPU_CONFIG)]
        command = [sys.executable, "-m", "pretrain.supervise", "--out", str(out), "--max_failures", "20"]
        command += ["--first_pause", "0.01", "--restart_stopped", "--", *run]
        with (tmp_path / "log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            supervisor = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, env=environment)
        faults = Faults(out, lambda: supervisor.poll() is not None, seed=wanted)
        number = 0
        try:
            while faults.count < wanted:
                faults.wait_for_step(8 + (steps - 24) * faults.count // wanted)
                faults.inject(number)
                number += 1
            exit_code = supervisor.wait(timeout=120)
        except RunGone:
            exit_code = supervisor.wait()
        finally:
            supervisor.kill()
        told = (tmp_path / "log").read_text(errors="replace")
        print(f"\n{faults.count} faults: {faults.counts}; {told.count('supervise: start ')} restarts")
        assert exit_code == 0, told[-5000:]
        assert faults.count >= wanted, "the run was over too soon"
        assert told.count("passing by a damaged checkpoint") > 0
        last = Path(f"checkpoints/step_{steps:08}")
        store.check_whole(out / last)
        a, b = optimizer_tensors(tmp_path / "undisturbed" / last), optimizer_tensors(out / last)
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []
        undisturbed = {line["step"]: line for line in metrics(tmp_path / "undisturbed")}
        lines = [line for line in metrics(out) if "loss" in line]
        assert all(line == undisturbed[line["step"]] for line in lines)
        assert len(lines) > 0.9 * steps  # a full disk costs some
