"""Checkpoints: a folder per saved step that is whole or absent, and what it takes to go on from one.

`checkpoints/step_00000100/` holds DeepSpeed's files (weights, fp32 masters, Adam moments) and `run_state.json`, which
says what they belong to: step, samples consumed, seed, model, data. The folder is written under a temporary name and
renamed when all of it is on disk, so a folder named `step_*` is finished; DeepSpeed's `latest` file is not used.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data_prep.durable import publish_folder, write_atomic
from deeploop_model import DeepLoopConfig
from pretrain.engine import Engine
from pretrain.errors import CheckpointError

FORMAT_VERSION = 1
STATE_FILE = "run_state.json"
STEP_FOLDER = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class RunState:
    """What a checkpoint belongs to, and where in the run it stands."""

    step: int
    """Optimizer steps done."""
    samples: int
    """Position in the data order: sequences consumed."""
    global_batch_size: int
    """Sequences of a step: the position in the data order is step times this."""
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
    tokenizer_sha256: str | None
    """Of the tokenizer's file, where the dataset has one."""
    frozen: list[str] = field(default_factory=list)
    """Names of the weights that do not learn: they have no optimizer state."""
    flops: int = 0
    """Matrix-product FLOPs of all steps so far, at the rounds that each of them ran."""
    format_version: int = FORMAT_VERSION


def model_fields(config: DeepLoopConfig) -> dict[str, Any]:
    """The config as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))  # type: ignore[no-any-return]


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def newest(root: Path) -> Path | None:
    """The finished checkpoint of the highest step, or None."""
    if not root.is_dir():
        return None
    steps = [(int(m[1]), path) for path in root.iterdir() if (m := STEP_FOLDER.fullmatch(path.name))]
    return max(steps)[1] if steps else None


def choose(resume: str, root: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, or None to start at step 0. Raises CheckpointError."""
    if resume == "never":
        return None
    if resume == "auto":
        return newest(root)
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"checkpoint.resume: {resume}: no such folder; use auto, never or a checkpoint's path")
    return path


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


def check_match(folder: Path, saved: RunState, current: RunState) -> None:
    """Raises CheckpointError, naming what differs, where the run cannot go on from the checkpoint."""
    defaults = model_fields(DeepLoopConfig())  # for checkpoints older than a field
    for name in sorted(saved.model.keys() | current.model.keys()):
        ours, theirs = (state.model.get(name, defaults.get(name)) for state in (current, saved))
        if ours != theirs:
            raise CheckpointError(
                f"{folder}: is of another model: model.{name} is {theirs!r} there and {ours!r} in this run"
            )
    for name, hint in (
        ("data_fingerprint", "the tokens or their tokenizer changed"),
        ("seed", "the data order would change"),
        ("global_batch_size", "samples would be skipped or seen twice"),
        ("world_size", "run with as many ranks"),
        ("zero_stage", "use the same ZeRO stage"),
        ("frozen", "the optimizer's state is of other weights; use the same train.trainable and train.frozen"),
    ):
        ours, theirs = getattr(current, name), getattr(saved, name)
        if ours != theirs:
            raise CheckpointError(f"{folder}: {name} is {theirs!r} there and {ours!r} in this run: {hint}")


def save(engine: Engine, root: Path, state: RunState, *, is_main: bool) -> Path:
    """Writes the checkpoint of `state.step`; every rank must call it. Returns its folder."""
    final = step_folder(root, state.step)
    temporary = root / f".{final.name}.tmp"
    if is_main:
        for stale in (temporary, final):  # left by a killed save; or the same step, trained again
            shutil.rmtree(stale, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(root), tag=temporary.name, save_latest=False)
    dist.barrier()
    if is_main:
        write_atomic(temporary / STATE_FILE, (json.dumps(dataclasses.asdict(state), indent=2) + "\n").encode())
        publish_folder(temporary, final)
    dist.barrier()
    return final


def load(engine: Engine, folder: Path) -> None:
    """Weights, fp32 masters and optimizer state; every rank must call it after `check_match`."""
    loaded, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if loaded is None:
        raise CheckpointError(f"{folder}: DeepSpeed could not load it")
