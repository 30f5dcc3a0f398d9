"""What a checkpoint belongs to, which one a run goes on from, and how it is loaded.

A checkpoint folder (`pretrain.checkpoint_store`) holds DeepSpeed's files (weights, fp32 masters, Adam moments) and
`run_state.json`, which says what they belong to: step, samples consumed, seed, model, data. DeepSpeed's `latest` file
is not used.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deeploop_model import DeepLoopConfig
from pretrain import checkpoint_store as store
from pretrain.engine import Engine
from pretrain.errors import CheckpointError
from pretrain.ranks import Ranks

FORMAT_VERSION = 1
STATE_FILE = "run_state.json"


@dataclass(frozen=True)
class RunState:
    """What a checkpoint belongs to, and where in the run it stands."""

    step: int
    """Optimizer steps done, those whose update was skipped included."""
    samples: int
    """Position in the data order: sequences consumed or passed over."""
    global_batch_size: int
    """Sequences of a step: the data order is cut into these."""
    seed: int
    """Random numbers of step s come from (seed, s), so this and `step` are the whole random state."""
    world_size: int
    """Ranks that the optimizer state is cut over."""
    zero_stage: int
    model: dict[str, Any]
    """Fields of the DeepLoopConfig."""
    alpha: float
    """Of the training depth N: how the weights must be run, whatever number of rounds runs later."""
    data_fingerprint: str
    """Of the tokens and the tokenizer."""
    tokenizer_sha256: str | None
    """Of the tokenizer's file, where the dataset has one."""
    frozen: list[str] = field(default_factory=list)
    """Names of the weights that do not learn: they have no optimizer state."""
    flops: int = 0
    """Matrix-product FLOPs of all steps so far, at the rounds that each of them ran."""
    passed_over: list[int] = field(default_factory=list)
    """Global batches that were left out, see `pretrain.bad_steps`."""
    bad_steps: dict[str, Any] = field(default_factory=dict)
    """State of the rule for bad steps."""
    format_version: int = FORMAT_VERSION


def model_fields(config: DeepLoopConfig) -> dict[str, Any]:
    """The config as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))  # type: ignore[no-any-return]


def newest(root: Path) -> Path | None:
    """The published checkpoint of the highest step, or None. Its files are not looked at."""
    return next(iter(store.finished(root)), None)


def choose(resume: str, root: Path, ranks: Ranks, group: dist.ProcessGroup) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, or None to start at step 0; every rank must call it.

    auto: the newest one that agrees with its checksums; damaged ones are named on standard error and passed by.
    Raises CheckpointError where a checkpoint was asked for and none is whole: starting again at step 0 must be said.
    """
    if resume == "never":
        return None
    if resume != "auto":
        fault = fault_of(Path(resume), ranks, group)
        if fault is not None:
            raise CheckpointError(f"checkpoint.resume: {fault}")
        return Path(resume)
    listing = [store.finished(root)]
    dist.broadcast_object_list(listing, src=0, group=group)  # nodes may see a new folder at different times
    for folder in listing[0]:
        fault = fault_of(folder, ranks, group)
        if fault is None:
            return folder
        if ranks.is_main:
            sys.stderr.write(f"passing by a damaged checkpoint: {fault}\n")
    if listing[0]:
        raise CheckpointError(
            f"{root}: none of {len(listing[0])} checkpoints is whole; use --resume never to start again at step 0"
        )
    return None


def fault_of(folder: Path, ranks: Ranks, group: dist.ProcessGroup) -> str | None:
    """What is wrong with a checkpoint's files, or None. The ranks share the reading and all get the same answer."""
    fault = None
    try:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; use auto, never or a checkpoint's path")
        read_state(folder)
        records = store.read_manifest(folder)
        store.check_files(folder, records, sorted(records)[ranks.rank :: ranks.world_size])
    except CheckpointError as error:
        fault = str(error)
    faults: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(faults, fault, group=group)
    return next((fault for fault in faults if fault is not None), None)


def read_state(folder: Path) -> RunState:
    """Raises CheckpointError where the folder is not one of our checkpoints."""
    path = folder / STATE_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format_version"] != FORMAT_VERSION:
            raise CheckpointError(f"{path}: format version {fields['format_version']}, expected {FORMAT_VERSION}")
        return RunState(**fields)
    except OSError:
        raise CheckpointError(f"{folder}: is not a checkpoint of this project ({STATE_FILE} is missing)") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be understood: {error}") from None


def check_match(folder: Path, saved: RunState, current: RunState, allowed: Collection[str] = ()) -> None:
    """Raises CheckpointError, naming all that differs, where the run cannot go on from the checkpoint.

    `allowed` holds keys that may differ. The number of ranks is no such key: it may always change.
    """
    differences = []
    defaults = model_fields(DeepLoopConfig())  # for checkpoints older than a field
    for name in sorted(saved.model.keys() | current.model.keys()):
        ours, theirs = (state.model.get(name, defaults.get(name)) for state in (current, saved))
        if ours != theirs:
            differences.append((f"model.{name}", theirs, ours, "it is of another model"))
    for name, hint in (
        ("data_fingerprint", "the tokens or their tokenizer changed"),
        ("seed", "the data order would change"),
        ("global_batch_size", "samples would be skipped or seen twice"),
        ("zero_stage", "use the same ZeRO stage"),
        ("frozen", "the optimizer's state is of other weights; use the same train.trainable and train.frozen"),
    ):
        ours, theirs = getattr(current, name), getattr(saved, name)
        if ours != theirs:
            differences.append((name, theirs, ours, hint))
    refused = [
        f"{name} is {theirs!r} there and {ours!r} in this run ({hint})"
        for name, theirs, ours, hint in differences
        if name not in allowed
    ]
    if refused:
        raise CheckpointError(f"{folder}: {'; '.join(refused)}; checkpoint.allow_differences takes such keys")


def load(engine: Engine, folder: Path) -> None:
    """Weights, fp32 masters and optimizer state, cut anew where the ranks are not as many as those that saved.

    Every rank must call it after `check_match`.
    """
    from pretrain.reshard import reading_for_these_ranks  # imports DeepSpeed, so only where there is an engine

    with reading_for_these_ranks(engine, folder, read_state(folder).world_size):
        loaded, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if loaded is None:
        raise CheckpointError(f"{folder}: DeepSpeed could not load it")
