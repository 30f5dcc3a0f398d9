"""The runs of a study: every combination of a grid's axes, and the unlooped controls beside the looped ones.

A control of a run with K blocks and R > 1 rounds has the same rule, seed and further values, and one round (its alpha
and beta are those of its own depth). Three questions, three controls:

| control                 | blocks | rounds | training tokens    | stored parameters | training FLOPs |
|-------------------------|--------|--------|--------------------|-------------------|----------------|
| equal_parameters        | K      | 1      | the same           | the same          | fewer          |
| equal_flops_more_tokens | K      | 1      | more, on average R | the same          | the same       |
| equal_flops_unshared    | K * R  | 1      | the same           | more              | the same       |

What do the extra rounds buy; would the same computation have bought more with more data; what does sharing the weights
cost. The factor of more_tokens is the ratio of FLOPs per token (`deeploop_model.flops`), somewhat under R since the
output matrix is applied once in both; the number of steps is rounded, so the FLOPs agree to half a step. The schedule
stretches with the steps, its warm-up does not. FLOPs are those of matrix products, without what is recomputed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeploop_model import DeepLoopConfig, ExponentRule
from deeploop_model.describe import describe
from deeploop_model.flops import train_flops
from deeploop_model.residual import DEEPLOOP, DEEPNORM
from pretrain.ablate.study import AXIS_KEYS, Control, Grid, Study
from pretrain.config import RunConfig
from pretrain.config_file import apply_override, check_config, read_yaml
from pretrain.ds_config import load_ds_config
from pretrain.errors import ConfigError
from pretrain.run_data import open_data
from pretrain.text_file import read_text

Assignment = dict[str, Any]
"""Values by axis, under the axis' own name."""


@dataclass(frozen=True)
class Setting:
    """What the seeds of one cell of a table share."""

    grid: str
    rule: str
    """Name of the residual rule, or `p = 0.3`."""
    rounds: int
    """R; of a control, that of the looped model that it goes with."""
    control: Control | None
    """None for the control of equal parameters as well: it is the grid's setting of one round."""
    further: tuple[tuple[str, str], ...]
    """Values of the grid's other axes, by key, as text."""


@dataclass(frozen=True)
class PlannedRun:
    """One run, checked."""

    setting: Setting
    name: str
    """Of its folder below that of the grid."""
    config: RunConfig
    tree: dict[str, Any]
    """The YAML that run.py is given."""

    @property
    def label(self) -> str:
        return f"{self.setting.grid}/{self.name}"

    @property
    def exponent(self) -> float | None:
        """p of the residual rule, where alpha = (2N)^p and beta = (8N)^(-p)."""
        residual = self.config.model.residual
        rule = {"deeploop": DEEPLOOP, "deepnorm": DEEPNORM}.get(residual) if isinstance(residual, str) else residual
        return rule.p if rule and (rule.c, rule.d) == (DEEPLOOP.c, DEEPLOOP.d) else None

    @property
    def tokens(self) -> int:
        """Tokens trained on by the last step."""
        train = self.config.train
        return train.steps * train.global_batch_size * self.config.model.context_length

    @property
    def flops(self) -> int:
        """Of the whole training; with drawn numbers of rounds, of their training at `model.num_rounds`."""
        return self.tokens * flops_per_token(self.config)


def flops_per_token(config: RunConfig) -> int:
    """Training FLOPs at `model.num_rounds`."""
    train = config.train
    return train_flops(config.model, backprop_rounds=train.backprop_rounds, round_loss=train.round_loss)


@functools.cache
def stored_parameters(model: DeepLoopConfig) -> int:
    return describe(model).stored_parameters


def plan(study: Study, overrides: list[str]) -> list[PlannedRun]:
    """All runs of a study in the order in which they are trained, each checked as run.py will check it.

    `overrides` (`dotted.key=value`) come over those of the study. The first seed of a grid comes first, over all its
    settings. A run that an earlier grid has as well, under whatever name, has that run's folder. Raises ConfigError or
    DataError with the grid and the run's values in front.
    """
    base = read_yaml(Path(study.base))
    runs: list[PlannedRun] = []
    for name, grid in study.grids.items():
        tree = copy.deepcopy(base)
        values = {**study.overrides, **grid.overrides}
        for override in [*(f"{key}={json.dumps(value)}" for key, value in values.items()), *overrides]:
            _refuse_axis(override, name, grid)
            apply_override(tree, override)
        runs += _unique(_runs_of_grid(study, name, grid, tree))
    _check_ds_config(study, runs)
    folders: dict[str, str] = {}
    return [_in_folder(run, folders.setdefault(_content(run.tree), run.config.out)) for run in runs]


def distinct(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Every folder once: the runs to train."""
    found: dict[str, PlannedRun] = {}
    for run in runs:
        found.setdefault(run.config.out, run)
    return list(found.values())


def _content(tree: dict[str, Any]) -> str:
    """All of a run but where it lies."""
    return json.dumps({**tree, "out": ""}, sort_keys=True)


def _in_folder(run: PlannedRun, out: str) -> PlannedRun:
    config, tree = dataclasses.replace(run.config, out=out), {**run.tree, "out": out}
    return dataclasses.replace(run, config=config, tree=tree)


def _check_ds_config(study: Study, runs: list[PlannedRun]) -> None:
    """Against every run where the number of ranks is known, which only the launcher knows otherwise."""
    if study.launcher:
        read_text(Path(study.ds_config))
        return
    for run in runs:
        load_ds_config(Path(study.ds_config), run.config, world_size=1)


def _refuse_axis(override: str, name: str, grid: Grid) -> None:
    key = override.partition("=")[0]
    if key in {AXIS_KEYS.get(axis, axis) for axis in grid.axes} or key == "out":
        place = "of the study file" if key == "out" else f"an axis of grid {name}"
        raise ConfigError(f"override {override!r}: {key} is {place}; change it there")


def _runs_of_grid(study: Study, name: str, grid: Grid, base: dict[str, Any]) -> Iterator[PlannedRun]:
    for assignment in assignments(grid):
        looped = _planned(study, name, base, assignment)
        if looped.config.model.num_rounds > 1:
            yield looped
            for control in grid.controls:
                yield _control(study, name, base, assignment, looped, control)
        else:
            yield looped


def _unique(runs: Iterator[PlannedRun]) -> list[PlannedRun]:
    """Without repetitions: several R have the same control of equal parameters, which is their R = 1."""
    found: dict[str, PlannedRun] = {}
    for run in runs:
        if found.setdefault(run.name, run).tree != run.tree:
            raise ConfigError(f"grid {run.setting.grid}: two different runs would be called {run.name}")
    return list(found.values())


def assignments(grid: Grid) -> list[Assignment]:
    """Every combination of the axes; rules of `residual` and of `p` are one axis, seeds the outermost."""
    axes = {axis: list(values) for axis, values in grid.axes.items() if axis not in ("residual", "p")}
    rules = [*grid.axes.get("residual", ()), *({"p": value} for value in grid.axes.get("p", ()))]
    if rules:
        axes = {"residual": rules, **axes}
    names = sorted(axes, key=lambda axis: axis != "seed")
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(axes[axis] for axis in names))]


def _planned(
    study: Study,
    grid: str,
    base: dict[str, Any],
    assignment: Assignment,
    control: Control | None = None,
    looped_rounds: int | None = None,
    changes: dict[str, Any] | None = None,
) -> PlannedRun:
    """`changes` are values by dotted key on top of the assignment's, which alone the name tells."""
    tree = copy.deepcopy(base)
    tree["out"] = study.out  # to be checked; the name follows from what the check finds
    keyed = {AXIS_KEYS.get(axis, axis): value for axis, value in assignment.items()}
    for key, value in {**keyed, **(changes or {})}.items():
        apply_override(tree, f"{key}={json.dumps(value)}")
    shown = ", ".join(f"{axis} {json.dumps(value)}" for axis, value in assignment.items())
    source = f"grid {grid}, {shown}: {study.base}" if shown else f"grid {grid}: {study.base}"
    config = check_config(tree, source=source)
    if not open_data(config).validation:
        raise ConfigError(f"{source}: train.validate_every: 0 leaves no validation loss to compare; use 1 or more")
    setting = Setting(
        grid=grid,
        rule=rule_name(config.model),
        rounds=looped_rounds or config.model.num_rounds,
        control=control,
        further=tuple((axis, _text(value)) for axis, value in assignment.items() if axis not in AXIS_KEYS),
    )
    name = run_name(setting, config.train.seed)
    tree["out"] = str(Path(study.out) / grid / name)
    return PlannedRun(setting, name, dataclasses.replace(config, out=tree["out"]), tree)


def _control(
    study: Study, grid: str, base: dict[str, Any], assignment: Assignment, looped: PlannedRun, control: Control
) -> PlannedRun:
    config = looped.config
    rounds = config.model.num_rounds
    if config.train.rounds != "fixed":
        raise ConfigError(f"grid {grid}: controls: need train.rounds fixed; leave them out, or fix the rounds")
    unlooped = {**assignment, "num_rounds": 1}
    if control == "equal_parameters":
        return _planned(study, grid, base, unlooped)
    if control == "equal_flops_more_tokens":
        one_round = _planned(study, grid, base, unlooped).config
        steps = round(config.train.steps * flops_per_token(config) / flops_per_token(one_round))
        return _planned(study, grid, base, unlooped, control, rounds, {"train.steps": steps})
    blocks = {"model.num_blocks": config.model.num_blocks * rounds}
    run = _planned(study, grid, base, unlooped, control, rounds, blocks)
    if run.flops != looped.flops:
        raise ConfigError(
            f"grid {grid}: controls: {control} trains {run.flops:,} FLOPs where {looped.name} trains {looped.flops:,}; "
            "model.injection, train.backprop_rounds and train.round_loss must be none, null and last for it"
        )
    return run


def rule_name(model: DeepLoopConfig) -> str:
    residual = model.residual
    if not isinstance(residual, ExponentRule):
        return residual
    constants = "" if (residual.c, residual.d) == (2, 8) else f", c = {residual.c:g}, d = {residual.d:g}"
    return f"p = {residual.p:g}{constants}"


def run_name(setting: Setting, seed: int) -> str:
    """Readable, and unlike that of any other run of the grid."""
    parts = [setting.rule.replace(" = ", "").replace(", ", "-"), f"R{setting.rounds}"]
    parts += [setting.control.replace("_", "-")] if setting.control else []
    parts += [f"{key.rpartition('.')[2]}={value}" for key, value in setting.further]
    return "_".join([*parts, f"seed{seed}"])


def _text(value: Any) -> str:
    """Of an axis' value, fit for a file name."""
    text = value if isinstance(value, str) else json.dumps(value)
    return "".join(character if character.isalnum() or character in "-+_.=" else "-" for character in text)
