"""From a YAML file and dotted overrides to a checked RunConfig. Every fault is one line that names the key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from data_prep.order import num_samples
from deeploop_model import DeepLoopModel, ExponentRule, ModelConfigError
from deeploop_model.presets import preset_fields
from pretrain.config import RunConfig, WeightedDataset
from pretrain.errors import ConfigError
from pretrain.freezing import freeze
from pretrain.recompute import chosen_recompute
from pretrain.rounds import (
    PoissonLognormalRounds,
    RoundsStage,
    UniformRounds,
    check_backprop,
    check_round_loss,
    check_rounds,
)
from pretrain.run_data import open_data
from pretrain.schedule import check_schedule
from pretrain.text_file import read_text

UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")


class _Loader(yaml.SafeLoader):
    """Safe loader that reads 6e-4 as a number, as YAML 1.2 does; PyYAML's YAML 1.1 makes it a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, overrides and checks a run's configuration, against the dataset that it names as well.

    Raises ConfigError for the file and its keys, DataError for the dataset.
    """
    tree = read_yaml(path)
    for override in overrides:
        apply_override(tree, override)
    return check_config(tree, source=str(path))


def check_config(tree: dict[str, Any], source: str) -> RunConfig:
    """The RunConfig of a tree of plain values. `source` names its origin in messages."""
    tree = _expand_preset(tree, source)
    refuse_infinite(tree, (), source)
    try:
        # As JSON: there a strict reader still takes an object for a dataclass and an array for a tuple.
        config = TypeAdapter(RunConfig).validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_fault(error, tree, _known_keys)}") from None
    try:
        check_schedule(config.train.steps, config.schedule)
        check_rounds(config.train.rounds)
        check_round_loss(config.train.round_loss, config.train.rounds, config.model.num_rounds)
        with torch.device("meta"):
            model = DeepLoopModel(config.model)
        freeze(model, config.train.trainable, config.train.frozen)
        check_backprop(config.train.backprop_rounds, config.train.rounds, model)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    config = _check_against_data(config, vocab_given="vocab_size" in tree.get("model", {}), source=source)
    try:
        chosen_recompute(config)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return config


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's mapping of sections. Raises ConfigError."""
    try:
        tree = yaml.load(read_text(path), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}: line {line}: {error.problem}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold sections (out, model, data, train, ...), found {type(tree).__name__}")
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets `dotted.key=value` in the tree; the value is read as YAML."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"override {override!r}: must look like section.key=value")
    *sections, key = dotted.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
    try:
        node[key] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None


def as_tree(config: RunConfig) -> dict[str, Any]:
    """The plain values of a config, as `check_config` reads them."""
    return _tuples_to_lists(dataclasses.asdict(config))  # type: ignore[no-any-return]


def _expand_preset(tree: dict[str, Any], source: str) -> dict[str, Any]:
    model = tree.get("model", {})
    if not isinstance(model, dict) or "preset" not in model:
        return tree
    own = {key: value for key, value in model.items() if key != "preset"}
    try:
        return {**tree, "model": {**preset_fields(model["preset"]), **own}}
    except ModelConfigError as error:
        raise ConfigError(f"{source}: model.{error}") from None


def refuse_infinite(node: Any, path: tuple[str, ...], source: str) -> None:
    """JSON, in which the tree is checked, has no infinity and no NaN; no key of ours wants one."""
    if isinstance(node, float) and not math.isfinite(node):
        raise ConfigError(f"{source}: {'.'.join(path)}: {node} must be a finite number")
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        refuse_infinite(child, (*path, str(key)), source)


def _check_against_data(config: RunConfig, *, vocab_given: bool, source: str) -> RunConfig:
    """Takes the vocabulary from the data unless the file sets it; the data must fit the model."""
    try:
        data = open_data(config)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    vocab_size = max(split.vocab_size for split in data.training.splits)
    if not vocab_given:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{source}: model.vocab_size: {config.model.vocab_size} is smaller than the vocabulary of "
            f"{data.tokenizer_folder}, {vocab_size}; leave the key out, or set it to {vocab_size} or more"
        )
    for validation in data.validation.values():
        num_samples(validation.num_tokens, config.model.context_length)
    return config


def first_fault(
    error: ValidationError,
    tree: dict[str, Any],
    known_keys: Callable[[tuple[str, ...], dict[str, Any]], list[str]],
) -> str:
    """One line for the first fault of a tree; the alternatives of a union are put together.

    `known_keys` gives the keys that a section, by its path, may have.
    """
    faults = [(_path(fault, tree), fault) for fault in error.errors(include_url=False)]
    # A misspelt key is also a missing one: say the misspelling.
    path, first = min(faults, key=lambda fault: fault[1]["type"] not in UNKNOWN_KEY)
    dotted = ".".join(path) or "(top level)"
    if first["type"] == "missing":
        return f"{dotted}: is required and missing"
    if first["type"] in UNKNOWN_KEY:
        known = known_keys(path[:-1], tree)
        close = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"{dotted}: unknown key; {hint}"
    for _, fault in faults:
        own_check = fault.get("ctx", {}).get("error")
        if isinstance(own_check, ModelConfigError):
            return f"model.{own_check}"
    wanted = " or ".join(dict.fromkeys(_wanted(fault) for where, fault in faults if where == path))
    return f"{dotted}: {first['input']!r} must be {wanted}"


def _wanted(fault: ErrorDetails) -> str:
    if fault["type"] in ("dataclass_type", "dataclass_exact_type"):
        return "a section of keys"
    return fault["msg"].removeprefix("Input should be ")


def _path(fault: ErrorDetails, tree: dict[str, Any]) -> tuple[str, ...]:
    """The keys of a fault's place in the tree; pydantic mixes names of union members into its own."""
    path: list[str] = []
    node: Any = tree
    for part in fault["loc"]:
        is_key = isinstance(node, dict) and part in node
        is_index = isinstance(node, list | tuple) and isinstance(part, int) and part < len(node)
        if is_key or is_index:
            node = node[part]
        elif not (fault["type"] == "missing" and part == fault["loc"][-1]):
            continue
        path.append(str(part))
    return tuple(path)


def _known_keys(section: tuple[str, ...], tree: dict[str, Any]) -> list[str]:
    if not section:
        return [field.name for field in dataclasses.fields(RunConfig)]
    if section[:2] == ("train", "rounds"):
        node = functools.reduce(lambda node, key: node[int(key) if isinstance(node, list) else key], section, tree)
        forms = {"uniform": UniformRounds, "poisson_lognormal": PoissonLognormalRounds}
        return [field.name for field in dataclasses.fields(forms.get(str(node.get("distribution")), RoundsStage))]
    if section[:2] == ("data", "path"):
        return [field.name for field in dataclasses.fields(WeightedDataset)]
    if section == ("model", "residual"):
        return [field.name for field in dataclasses.fields(ExponentRule)]
    names = [field.name for field in dataclasses.fields(get_type_hints(RunConfig)[section[0]])]
    return ["preset", *names] if section == ("model",) else names


def _tuples_to_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples_to_lists(item) for key, item in value.items()}
    return [_tuples_to_lists(item) for item in value] if isinstance(value, list | tuple) else value
