"""A mistake in a study file is one line that names the key, before anything is trained."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.ablate.__main__ import main
from pretrain.ablate.study_file import launch_command, load_study
from tests.support.runs import write_tree

FAULTS: list[tuple[str, Any, str]] = [
    ("grid", {}, "grid: unknown key; did you mean 'grids'?"),
    ("grids.rounds.axis", {}, "grids.rounds.axis: unknown key; did you mean 'axes'?"),
    ("grids.rounds.axes.seed", [], "grids.rounds.axes.seed: [] must be"),
    ("grids.rounds.axes.rounds", [1], "grids.rounds.axes.rounds: is no axis; use residual, p, num_rounds, seed"),
    ("grids.rounds.axes.p", ["much"], "grids.rounds.axes.p: 'much' must be a number"),
    ("grids.rounds.axes", {"train.seed": [0]}, "grids.rounds.axes.train.seed: call this axis seed"),
    ("grids.rounds.axes.seed", [1, 1], "grids.rounds.axes.seed: 1 is there twice"),
    ("grids.rounds.controls", ["deeper"], "grids.rounds.controls.0: 'deeper' must be 'equal_parameters'"),
    ("grids.rounds.overrides", {"train.seed": 3}, "grids.rounds.overrides.train.seed: is an axis of grid rounds"),
    ("grids", {"a/b": {"axes": {"seed": [0]}}}, "grids.a/b: the name becomes a folder's"),
    ("divergence", {"margin": -1.0}, "divergence.margin: -1.0 must be greater than or equal to 0"),
    ("divergence", {"margin": float("inf")}, "divergence.margin: inf must be a finite number"),
    ("launcher", "no-such-launcher -n 2", "launcher: 'no-such-launcher' is no program here"),
    ("launcher", "deepspeed 'open", 'launcher: "deepspeed \'open"'),
    ("base", "nowhere.yaml", "nowhere.yaml: cannot be read"),
    ("ds_config", "nowhere.json", "nowhere.json"),
    ("overrides", {"train.stepz": 3}, "train.stepz: unknown key; did you mean 'steps'?"),
    ("overrides", {"train.validate_every": 0}, "train.validate_every: 0 leaves no validation loss"),
    ("overrides", {"train.global_batch_size": 9}, "9 is not a multiple of train.micro_batch_size 4"),
    ("grids.rounds.axes.optimizer.lr", [1e-3, -1e-3], "optimizer.lr -0.001: "),
    ("grids.rounds.axes.num_rounds", [2, 0], "model.num_rounds: 0 must be 1 or more"),
    ("grids.rounds.axes.residual", ["deeploop", "postnorm"], 'residual "postnorm"'),
]


def set_key(tree: dict[str, Any], dotted: str, value: Any) -> None:
    known = dotted.split(".axes.")
    *sections, key = [*known[0].split("."), *(["axes", known[1]] if known[1:] else [])]
    functools.reduce(lambda node, section: node[section], sections, tree)[key] = value


@pytest.mark.parametrize(("dotted", "value", "message"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line(
    dotted: str,
    value: Any,
    message: str,
    study_tree: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = copy.deepcopy(study_tree)
    set_key(tree, dotted, value)
    path = write_tree(tmp_path / "study.yaml", tree)
    assert main([str(path)]) == 2
    written = capsys.readouterr().err
    assert written.startswith(f"error: {path}: ")
    assert written.count("\n") == 1
    assert message in written
    assert not (tmp_path / "study").exists()


def test_launchers_come_from_this_environment_and_know_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_command("") == [sys.executable]
    monkeypatch.setenv("RANKS", "2")
    monkeypatch.setenv("PATH", "/usr/bin")
    command = launch_command("deepspeed --num_gpus $RANKS --master_port 29777")
    assert command == [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", "29777"]


def test_defaults(study_tree: dict[str, Any], tmp_path: Path) -> None:
    study = load_study(write_tree(tmp_path / "study.yaml", study_tree))
    assert (study.launcher, study.divergence.margin, study.divergence.val_loss) == ("", 0.1, None)
    assert study.grids["rounds"].controls == ()
