"""Reading back what `pretrain.export` wrote: a `.safetensors` file, or a folder for `transformers`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from deeploop_model import DeepLoopConfig
from pretrain.errors import CheckpointError

METADATA_KEY = "deeploop"
HF_CONFIG, HF_WEIGHTS, HF_PREFIX = "config.json", "model.safetensors", "model."
HF_TRAINING = "deeploop_training"


@dataclass(frozen=True)
class SavedModel:
    """A model as a checkpoint or an export holds it."""

    fields: dict[str, Any]
    """Of the DeepLoopConfig."""
    weights: dict[str, Tensor]
    """float32, by name."""
    alpha: float
    tokenizer_sha256: str | None


def is_exported(path: Path) -> bool:
    """Whether the path is that of an export and not of a run or a checkpoint."""
    return path.suffix == ".safetensors" or (path / HF_CONFIG).is_file()


def read_exported(path: Path) -> SavedModel:
    """Raises CheckpointError for what `pretrain.export` did not write."""
    if path.suffix == ".safetensors":
        weights, metadata = read_tensors(path)
        try:
            own = json.loads(metadata[METADATA_KEY])
            fields, facts = own["model"], own["training"]
            return SavedModel(fields, weights, facts["alpha"], facts["tokenizer_sha256"])
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path}: is no export of this project (its metadata say nothing of it)") from None
    try:
        content = json.loads((path / HF_CONFIG).read_text(encoding="utf-8"))
        fields = {name: content[name] for name in DeepLoopConfig.__dataclass_fields__ if name in content}
        facts = content[HF_TRAINING]
        alpha, sha256 = facts["alpha"], facts["tokenizer_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{path / HF_CONFIG}: is no export of this project ({HF_TRAINING} is missing or damaged)"
        ) from None
    weights, _ = read_tensors(path / HF_WEIGHTS)
    return SavedModel(fields, {name.removeprefix(HF_PREFIX): w for name, w in weights.items()}, alpha, sha256)


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """float32 tensors by name, and the metadata, of a safetensors file. Raises CheckpointError."""
    try:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            return {name: tensors.get_tensor(name).float() for name in names}, tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
