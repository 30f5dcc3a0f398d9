"""From a YAML file to a checked Study. Every fault is one line that names the key."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pretrain.ablate.study import AXIS_KEYS, Divergence, Grid, Study
from pretrain.config_file import first_fault, read_yaml, refuse_infinite
from pretrain.errors import ConfigError

NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def load_study(path: Path) -> Study:
    """Reads and checks a study file, all but the runs that it plans. Raises ConfigError."""
    tree = read_yaml(path)
    refuse_infinite(tree, (), str(path))
    try:
        study = TypeAdapter(Study).validate_json(json.dumps(tree, default=str), strict=True)
        for name, grid in study.grids.items():
            _check_grid(name, grid, study)
        launch_command(study.launcher)
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error, tree, _known_keys)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return study


def launch_command(launcher: str) -> list[str]:
    """The words that go before `pretrain/run.py`. Raises ConfigError where the program is not to be found."""
    try:
        words = shlex.split(os.path.expandvars(launcher))
    except ValueError as error:
        raise ConfigError(f"launcher: {launcher!r}: {error}") from None
    if not words:
        return [sys.executable]
    # The environment of this Python comes first: its launcher starts its Python.
    found = shutil.which(words[0], path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        raise ConfigError(f"launcher: {words[0]!r} is no program here; leave the key out for one process")
    return [found, *words[1:]]


def _check_grid(name: str, grid: Grid, study: Study) -> None:
    where = f"grids.{name}"
    if not set(name) <= NAME_CHARACTERS or name.startswith("."):
        raise ConfigError(f"{where}: the name becomes a folder's: use letters, digits, '-', '_' and '.'")
    keys = {AXIS_KEYS.get(axis, axis) for axis in grid.axes}
    for axis, values in grid.axes.items():
        if axis not in AXIS_KEYS and "." not in axis:
            raise ConfigError(
                f"{where}.axes.{axis}: is no axis; use {', '.join(AXIS_KEYS)}, or a dotted key such as optimizer.lr"
            )
        if axis not in AXIS_KEYS and axis in AXIS_KEYS.values():
            short = next(short for short, key in AXIS_KEYS.items() if key == axis)
            raise ConfigError(f"{where}.axes.{axis}: call this axis {short}")
        twice = next((value for index, value in enumerate(values) if value in values[:index]), None)
        if twice is not None:
            raise ConfigError(f"{where}.axes.{axis}: {twice!r} is there twice")
    for value in grid.axes.get("p", ()):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}.axes.p: {value!r} must be a number")
    for section, overrides in (("overrides", study.overrides), (f"{where}.overrides", grid.overrides)):
        for key in overrides:
            if key in keys:
                raise ConfigError(f"{section}.{key}: is an axis of grid {name}; leave it out here")


def _known_keys(section: tuple[str, ...], tree: dict[str, Any]) -> list[str]:
    if section == ("divergence",):
        return _names(Divergence)
    return _names(Grid) if section[:1] == ("grids",) and len(section) == 2 else _names(Study)


def _names(section: type[Study] | type[Grid] | type[Divergence]) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]
