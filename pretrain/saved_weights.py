"""The whole weights in DeepSpeed's checkpoint files, put together from every rank's part.

DeepSpeed's own script for this unpickles without restriction and does not know the files of every stage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint import RunState
from pretrain.checkpoint_files import MODEL_FILE, MODEL_FILE_STAGE3, OPTIMIZER_FILE, read_file
from pretrain.errors import CheckpointError
from pretrain.zero_layout import masters_of, saved_places


def whole_weights(folder: Path, state: RunState) -> dict[str, Tensor]:
    """fp32 masters by name; frozen weights and buffers as the ranks held them. Raises CheckpointError."""
    if state.zero_stage == 0:
        raise CheckpointError(f"{folder}: was saved without ZeRO; only stages 1 to 3 can be read")
    ranks = range(state.world_size)
    stage3 = state.zero_stage == 3
    names = [folder / (MODEL_FILE_STAGE3.format(rank=rank) if stage3 else MODEL_FILE) for rank in ranks]
    models: list[dict[str, Any]] = [read_file(name, mmap=True) for name in (names if stage3 else names[:1])]
    states = [read_file(folder / OPTIMIZER_FILE.format(rank=r), mmap=True)["optimizer_state_dict"] for r in ranks]
    model = models[0]
    shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
    weights: dict[str, Tensor] = dict(model["module"])
    for name, shape in (model.get("frozen_param_shapes") or {}).items() if stage3 else ():
        parts = [one["frozen_param_fragments"][name] for one in models]
        weights[name] = torch.cat(parts)[: shape.numel()].view(shape)
    flats = [masters_of(one) for one in states]
    for name, places in saved_places(states, model["param_shapes"] if stage3 else None).items():
        parts = [flats[rank][place.group].narrow(0, place.start, place.length) for rank, place in places]
        whole = torch.cat(parts)
        if whole.numel() != shapes[name].numel():
            raise CheckpointError(f"{folder}: holds {whole.numel()} of {shapes[name].numel()} elements of {name}")
        weights[name] = whole.view(shapes[name])
    for alias, source in (model["shared_params"] or {}).items():
        weights[alias] = weights[source]
    return weights
