"""Optimizer state cut for one number of ranks, read for another: the same values at the same places of each weight.

ZeRO-1 and 2 flatten each parameter group and give every rank one stretch of it. A rank's file says which part of which
weight lies where in its stretch, so a weight's fragments, in the order of ranks, are the whole weight. The state that a
rank of the new number would have saved is put together from them, and DeepSpeed loads it in its usual way: masters and
moments are copied, never computed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.checkpoint_files import MODEL_FILE, read_file
from pretrain.engine import Engine
from pretrain.errors import CheckpointError

RANK_FILE = "bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
Name = tuple[int, str]  # (parameter group, weight)


class Fragment(NamedTuple):
    """`length` elements of a flattened weight from `offset` on, at `start` of a rank's stretch of the group."""

    offset: int
    length: int
    start: int


def reader(engine: Engine, folder: Path, saved_world_size: int) -> Callable[[Path], Any]:
    """What reads the checkpoint's files for this rank: as they are, or cut anew where the number of ranks changed."""
    import torch.distributed as dist

    if saved_world_size == dist.get_world_size():
        return read_file

    def read(path: Path) -> Any:
        if path.name == MODEL_FILE:
            return {**read_file(path), "dp_world_size": dist.get_world_size()}
        files = [read_file(folder / RANK_FILE.format(rank=rank), mmap=True) for rank in range(saved_world_size)]
        return reshard(files, fragments_here(engine.optimizer), partition_sizes(engine.optimizer), folder)

    return read


def fragments_here(optimizer: Any) -> dict[Name, Fragment]:
    """What this rank owns of every weight, in DeepSpeed's ZeRO-1 or ZeRO-2 optimizer."""
    groups = optimizer.bit16_groups if hasattr(optimizer, "bit16_groups") else optimizer.bf16_groups
    found = {}
    for index, group in enumerate(groups):
        for weight in group:
            mapping = weight._hp_mapping
            if mapping is not None:
                where = mapping.hp_fragment_address
                name = (index, optimizer.param_names[weight])
                found[name] = Fragment(mapping.lp_fragment_address.start, where.numel, where.start)
    return found


def partition_sizes(optimizer: Any) -> list[int]:
    """Elements of this rank's stretch of each group, padding included."""
    flat = (
        optimizer.single_partition_of_fp32_groups
        if hasattr(optimizer, "single_partition_of_fp32_groups")
        else optimizer.fp32_groups_flat_partition
    )
    return [partition.numel() for partition in flat]


def saved_fragments(states: list[dict[str, Any]]) -> dict[Name, list[tuple[int, Fragment]]]:
    """(rank, fragment) of every weight in the saved states, in the order of ranks."""
    found: dict[Name, list[tuple[int, Fragment]]] = {}
    for rank, state in enumerate(states):
        for group, mapping in enumerate(state["param_slice_mappings"]):
            for name, where in mapping.items():
                before = found.setdefault((group, name), [])
                offset = sum(fragment.length for _, fragment in before)
                before.append((rank, Fragment(offset, where.numel, where.start)))
    return found


def reshard(files: list[dict[str, Any]], here: dict[Name, Fragment], sizes: list[int], folder: Path) -> dict[str, Any]:
    """The content of an optimizer file for a rank that owns `here`, from the files of all ranks that saved.

    Args:
        files: by rank.
        here: what the new rank owns.
        sizes: elements of the new rank's stretch of each group. Padding is zero, in masters and moments.
        folder: for messages. Raises CheckpointError where the files don't hold what is owned here.
    """
    states = [file["optimizer_state_dict"] for file in files]
    if any("param_slice_mappings" not in state for state in states):
        raise CheckpointError(f"{folder}: ZeRO-3 state cannot be cut anew: run with as many ranks as saved it")
    saved = saved_fragments(states)

    def gathered(group: int, flats: list[Tensor]) -> Tensor:
        """The new rank's stretch of `group`, from the stretches `flats` of the ranks that saved."""
        flat = torch.zeros(sizes[group], dtype=torch.float32)
        for (owner, name), mine in here.items():
            if owner != group:
                continue
            filled = 0
            for rank, theirs in saved.get((group, name), []):
                first = max(mine.offset, theirs.offset)
                length = min(mine.offset + mine.length, theirs.offset + theirs.length) - first
                if length > 0:
                    source = flats[rank].narrow(0, theirs.start + first - theirs.offset, length)
                    flat.narrow(0, mine.start + first - mine.offset, length).copy_(source)
                    filled += length
            if filled != mine.length:
                raise CheckpointError(f"{folder}: holds {filled} of {mine.length} elements of {name} that a rank needs")
        return flat

    template = states[0]
    base = template["base_optimizer_state"]
    moments: dict[int, dict[str, Any]] = {}
    masters = []
    for group in range(len(sizes)):
        masters.append(gathered(group, [state["single_partition_of_fp32_groups"][group] for state in states]))
        moments[group] = {}
        for key, value in base["state"][group].items():
            flats = [state["base_optimizer_state"]["state"][group][key] for state in states]
            is_moment = value.ndim > 0  # the other entry is the step count, the same for all
            moments[group][key] = gathered(group, flats) if is_moment else value.clone()
    state = {**template, "base_optimizer_state": {**base, "state": moments}, "single_partition_of_fp32_groups": masters}
    return {**files[0], "optimizer_state_dict": state}
