"""A rank killed at every moment of a step and of a save: what goes on equals the run that nobody disturbed.

One run is started again and again, and each start dies at another point. After each, every checkpoint that is there is
whole and holds the undisturbed run's bits; at the end so do the last weights, moments and all lines of metrics.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch

from pretrain import checkpoint_store as store
from tests.support.kill_points import KILL_POINTS
from tests.support.ranks import exit_statuses, run_ranks
from tests.support.runs import metrics, optimizer_tensors, run_main, small_tree, write_tree

STEPS = 60


def killed_main(config: Path, point: str) -> int:
    with KILL_POINTS[point].armed():
        return run_main(config)


def tree(out: Path, dataset: Path, keep_last: int) -> dict[str, Any]:
    """Everything that a resumed run could get wrong: drawn rounds, the learning rate's course, the order of samples."""
    rounds = {"distribution": "uniform", "low": 1, "high": 3}
    values = small_tree(out, dataset, steps=STEPS, micro_batch_size=2, validate_every=0, rounds=rounds)
    values["checkpoint"] = {"every": 3, "keep_last": keep_last}
    return values


def differing(ours: Path, theirs: Path) -> list[str]:
    """Masters and moments of two checkpoints that are not the same bits."""
    a, b = optimizer_tensors(ours), optimizer_tensors(theirs)
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_a_kill_at_any_moment_changes_nothing(dataset: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    undisturbed = write_tree(tmp_path / "whole.yaml", tree(whole, dataset, keep_last=100))
    assert [r.value for r in run_ranks(2, run_main, undisturbed, folder=tmp_path)] == [0, 0]
    expected = metrics(whole)
    config = write_tree(tmp_path / "run.yaml", tree(out, dataset, keep_last=1))
    for name, point in KILL_POINTS.items():
        statuses = exit_statuses(2, killed_main, config, name, folder=tmp_path)
        assert statuses[point.rank] == -signal.SIGKILL, f"{name}: {statuses}"
        assert statuses[1 - point.rank] not in (0, None), f"{name}: {statuses}"
        for folder in store.finished(out / "checkpoints"):
            store.check_whole(folder)
            assert differing(folder, whole / "checkpoints" / folder.name) == [], name
        told = [line for line in metrics(out) if "loss" in line]
        assert told == expected[: len(told)], name
    print(f"\n{len(KILL_POINTS)} kill points, to step {len(metrics(out))}")
    assert [r.value for r in run_ranks(2, run_main, config, folder=tmp_path)] == [0, 0]
    last = Path(f"checkpoints/step_{STEPS:08}")
    assert list((out / "checkpoints").iterdir()) == [out / last]  # nothing of the killed saves is left
    assert differing(out / last, whole / last) == []
    assert metrics(out) == expected
