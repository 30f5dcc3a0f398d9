"""Optimizer state cut for one number of ranks, read for another: the same values at the same places of each weight.

Every rank's file says, one way or another (`pretrain.zero_layout`), which part of which weight lies where in it. The
state that a rank of the new number would have saved is put together from them, and DeepSpeed loads it in its usual way:
masters and moments are copied, never computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.checkpoint_files import MODEL_FILE, MODEL_FILE_STAGE3, OPTIMIZER_FILE, read_file
from pretrain.engine import Engine
from pretrain.errors import CheckpointError
from pretrain.zero_layout import Layout, State, layout_here, masters_of, moments_of, saved_places, with_tensors


@contextmanager
def reading_for_these_ranks(engine: Engine, folder: Path, saved_world_size: int) -> Iterator[None]:
    """Lets `engine` load `folder`: its files as they are, or cut anew where the number of ranks changed."""
    if saved_world_size == dist.get_world_size():
        yield
        return
    reader = Reader(engine, folder, saved_world_size)
    # Under ZeRO-3 every rank has a model file; DeepSpeed looks for one of this rank, which need not be there.
    engine._get_all_ckpt_names = lambda path, tag: [str(reader.model_file(0))]
    engine.checkpoint_engine.reader = reader
    try:
        yield
    finally:
        engine.checkpoint_engine.reader = read_file
        del engine._get_all_ckpt_names


class Reader:
    """Reads a checkpoint of another number of ranks for this rank."""

    def __init__(self, engine: Engine, folder: Path, saved_world_size: int) -> None:
        self._folder = folder
        self._ranks = range(saved_world_size)
        self._stage3: bool = engine.zero_optimization_partition_weights()
        self._layout = layout_here(engine)

    def __call__(self, path: Path) -> Any:
        """The content of a model file or of an optimizer file, whichever `path` names. Raises CheckpointError."""
        if path.name == self.model_file(0).name:
            content = {**read_file(path), "dp_world_size": dist.get_world_size()}
            return {**content, "frozen_param_fragments": self._frozen(content)} if self._stage3 else content
        files = [read_file(self._folder / OPTIMIZER_FILE.format(rank=rank), mmap=True) for rank in self._ranks]
        weights = read_file(self.model_file(0), mmap=True)["param_shapes"] if self._stage3 else None
        states = [file["optimizer_state_dict"] for file in files]
        return {**files[0], "optimizer_state_dict": reshard(states, weights, self._layout, self._folder)}

    def model_file(self, rank: int) -> Path:
        """The file in which `rank` saved the model: the same for all but under ZeRO-3."""
        return self._folder / (MODEL_FILE_STAGE3.format(rank=rank) if self._stage3 else MODEL_FILE)

    def _frozen(self, content: dict[str, Any]) -> dict[str, Tensor] | None:
        """This rank's parts of the weights that do not learn, which only the model files hold."""
        if not content.get("frozen_param_fragments"):
            return None
        parts = [read_file(self.model_file(rank), mmap=True)["frozen_param_fragments"] for rank in self._ranks]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        found = {}
        for name, shape in content["frozen_param_shapes"].items():
            whole = torch.cat([part[name] for part in parts])[: shape.numel()]
            size = -(-shape.numel() // world_size)
            part = torch.zeros(size, dtype=whole.dtype)
            here = whole[rank * size : (rank + 1) * size]
            part[: here.numel()] = here
            found[name] = part
        return found


def reshard(states: list[State], weights: list[dict[str, Any]] | None, here: Layout, folder: Path) -> State:
    """The optimizer state for a rank that holds `here`, from the states of all ranks that saved.

    Args:
        states: by rank.
        weights: of ZeRO-3: by flat tensor, the shapes of its weights by name.
        here: what the new rank holds. Padding becomes zero, in masters and moments.
        folder: for messages. Raises CheckpointError where the files don't hold what belongs here.
    """
    saved = saved_places(states, weights)

    def gathered(group: int, flats: list[list[Tensor]]) -> Tensor:
        """The new rank's flat tensor `group`, from those of the ranks that saved."""
        flat = torch.zeros(here.sizes[group], dtype=torch.float32)
        for name, mine in here.places.items():
            if mine.group != group:
                continue
            filled = 0
            for rank, theirs in saved.get(name, []):
                first = max(mine.offset, theirs.offset)
                length = min(mine.offset + mine.length, theirs.offset + theirs.length) - first
                if length > 0:
                    source = flats[rank][theirs.group].narrow(0, theirs.start + first - theirs.offset, length)
                    flat.narrow(0, mine.start + first - mine.offset, length).copy_(source)
                    filled += length
            if filled != mine.length:
                raise CheckpointError(f"{folder}: holds {filled} of {mine.length} elements of {name} that a rank needs")
        return flat

    groups = range(len(here.sizes))
    masters = [gathered(group, [masters_of(state) for state in states]) for group in groups]
    moments: dict[int, dict[str, Tensor]] = {group: {} for group in groups}
    for key, value in moments_of(states[0])[0].items():
        if value.ndim == 0:  # the number of steps, the same for all
            for group in groups:
                moments[group][key] = value.clone()
            continue
        flats = [[moments_of(state)[group][key] for group in range(len(masters_of(state)))] for state in states]
        for group in groups:
            moments[group][key] = gathered(group, flats)
    return with_tensors(states[0], masters, moments, here)
