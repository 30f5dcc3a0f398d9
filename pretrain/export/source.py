"""What there is to export: a checkpoint's model, and what its run tells about it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deeploop_model import DeepLoopModel
from pretrain.checkpoint import model_fields, read_state
from pretrain.weights import find_checkpoint, load_model


@dataclass(frozen=True)
class Source:
    """A model on the CPU, in the precision of the export, and where it comes from."""

    model: DeepLoopModel
    folder: Path
    """The checkpoint."""
    facts: dict[str, Any]
    """Training facts as JSON values: step, tokens, alpha, losses and so on."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the DeepLoopConfig as JSON values."""
        return model_fields(self.model.config)


def read_source(checkpoint: Path, dtype: torch.dtype) -> Source:
    """The optimizer's master weights of a checkpoint or a run folder's newest, rounded to `dtype`.

    Raises CheckpointError.
    """
    folder = find_checkpoint(checkpoint)
    state = read_state(folder)
    model = load_model(folder).to(dtype)
    facts = {
        "step": state.step,
        "tokens": state.samples * model.config.context_length,
        "training_flops": state.flops,
        "data_fingerprint": state.data_fingerprint,
        "tokenizer_sha256": state.tokenizer_sha256,
        "seed": state.seed,
        "alpha": state.alpha,
        "ranks": state.world_size,
        "zero_stage": state.zero_stage,
        **last_losses(folder.parent.parent / "metrics.jsonl", state.step),
    }
    return Source(model, folder, facts)


def last_losses(metrics: Path, step: int) -> dict[str, float | None]:
    """`loss` and `val_loss`, in nats per token, as last written at or before a step; None where they never were."""
    losses: dict[str, float | None] = {"loss": None, "val_loss": None}
    if metrics.is_file():
        for text in metrics.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # the last line of a run that was killed
                continue
            for name in losses.keys() & line.keys():
                value = float(line[name])
                if line["step"] <= step and math.isfinite(value):
                    losses[name] = value
    return losses
