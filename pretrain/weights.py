"""The model of a checkpoint or an export, on one process and without an engine.

A checkpoint may be of any number of ranks and any ZeRO stage.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor

from deeploop_model import DeepLoopConfig, DeepLoopModel
from pretrain.checkpoint import model_fields, newest, read_state
from pretrain.checkpoint_store import check_whole
from pretrain.errors import CheckpointError
from pretrain.exported import SavedModel, is_exported, read_exported

MEANING_OF_WEIGHTS = (
    "num_heads", "num_kv_heads", "position", "rope_base", "qk_norm", "feed_forward", "residual", "tie_embeddings",
)  # fmt: skip
"""Model fields that no shape tells, and that the same weights give another function with."""


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`: itself, or the newest one of a run folder; or the export. Raises CheckpointError."""
    if is_exported(path):
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run folder or a checkpoint in its checkpoints/")
    return newest(path / "checkpoints") or path


def read_saved(path: Path) -> SavedModel:
    """What a checkpoint, with the optimizer's own master weights, or an export holds. Raises CheckpointError.

    A checkpoint's files are compared with their checksums first.
    """
    if is_exported(path):
        return read_exported(path)
    state = read_state(path)
    try:
        check_whole(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; give the path of an earlier checkpoint") from None
    return SavedModel(state.model, master_weights(path), state.alpha, state.tokenizer_sha256)


def load_model(folder: Path) -> DeepLoopModel:
    """The float32 model on the CPU, from a checkpoint or an export. Raises CheckpointError."""
    saved = read_saved(folder)
    model, weights = DeepLoopModel(TypeAdapter(DeepLoopConfig).validate_python(saved.fields)), saved.weights
    expected = model.state_dict().keys()
    if weights.keys() != expected:
        odd = min(weights.keys() ^ expected)
        where = "is missing" if odd in expected else "has no place in the model"
        raise CheckpointError(f"{folder}: the weight {odd} {where}")
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def load_initial_weights(model: DeepLoopModel, path: Path, tokenizer_sha256: str | None) -> str:
    """Copies a checkpoint's weights into a model that may have more of them: blocks before or after the loop, say.

    Returns one line that says what came from where. Raises CheckpointError where weights would mean something else
    here: another tokenizer, other heads or positions, a weight without a place of its shape.
    """
    try:
        folder = find_checkpoint(path)
        saved = read_saved(folder)
    except CheckpointError as error:
        raise CheckpointError(f"train.initial_weights: {error}") from None
    source = f"train.initial_weights: {folder}"
    if saved.tokenizer_sha256 != tokenizer_sha256:
        raise CheckpointError(f"{source}: was trained with another tokenizer than that of this dataset")
    here, there, own = model_fields(model.config), model_fields(DeepLoopConfig()) | saved.fields, model.state_dict()
    for name in MEANING_OF_WEIGHTS:
        if here[name] != there[name]:
            raise CheckpointError(f"{source}: model.{name} is {there[name]!r} there and {here[name]!r} in this run")
    for name, weight in saved.weights.items():
        if name not in own or own[name].shape != weight.shape:
            found = f"of shape {list(own[name].shape)}" if name in own else "absent"
            raise CheckpointError(f"{source}: {name} is of shape {list(weight.shape)} there and {found} in this model")
    model.load_state_dict(saved.weights, strict=False)
    line = f"initial weights from {folder}"
    new = [name for name in own if name not in saved.weights]
    if new:
        line += f"; not there and drawn anew: {', '.join(new)}"
    alpha = model.config.rule.alpha
    if saved.alpha != alpha:
        line += f"; they were trained at alpha {saved.alpha:.4g} and this run has {alpha:.4g}"
        line += ": model.residual_depth can keep it"
    return line


def master_weights(folder: Path) -> dict[str, Tensor]:
    """fp32 weights by name, put together from every rank's part; frozen weights as the ranks held them.

    Raises CheckpointError where DeepSpeed's files cannot be read.
    """
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger keeps the stream that it is imported with
        from pretrain.saved_weights import whole_weights

    return {name: weight.float() for name, weight in whole_weights(folder, read_state(folder)).items()}
