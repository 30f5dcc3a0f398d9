"""The model of a checkpoint, on one process and without an engine, whatever ranks and ZeRO stage wrote it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor

from deeploop_model import DeepLoopConfig, DeepLoopModel
from pretrain.checkpoint import newest, read_state
from pretrain.errors import CheckpointError


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`: itself, or the newest one of a run folder. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run folder or a checkpoint in its checkpoints/")
    return newest(path / "checkpoints") or path


def load_model(folder: Path) -> DeepLoopModel:
    """The float32 model on the CPU, with the optimizer's own master weights. Raises CheckpointError."""
    model = DeepLoopModel(TypeAdapter(DeepLoopConfig).validate_python(read_state(folder).model))
    weights = master_weights(folder)
    expected = model.state_dict().keys()
    if weights.keys() != expected:
        odd = min(weights.keys() ^ expected)
        where = "is missing" if odd in expected else "has no place in the model"
        raise CheckpointError(f"{folder}: the weight {odd} {where}")
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def master_weights(folder: Path) -> dict[str, Tensor]:
    """fp32 weights by name, put together from every rank's part; frozen weights as the ranks held them.

    Raises CheckpointError where DeepSpeed cannot read its own files.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells what it finds
            weights = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
    except (OSError, ValueError, RuntimeError, KeyError, EOFError) as error:
        raise CheckpointError(f"{folder}: DeepSpeed's files cannot be read: {error}") from None
    return {name: weight.float() for name, weight in weights.items()}
