"""Where ZeRO keeps what it keeps of each weight: the layouts of its stages, in an engine and in a checkpoint's files.

Stages 1 and 2 flatten each parameter group and give every rank one stretch of it; a rank's file says which part of
which weight lies where. Stage 3 cuts each weight by itself into as many equal parts as there are ranks, the last ones
padded, and lays a rank's parts one behind the other, in groups of `sub_group_size`; the files name the weights in this
order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from pretrain.engine import Engine

State = dict[str, Any]
"""The optimizer's part of a rank's file."""


class Place(NamedTuple):
    """`length` elements of a flattened weight from `offset` on, at `start` of a rank's flat tensor `group`."""

    group: int
    offset: int
    length: int
    start: int


class Layout(NamedTuple):
    """What one rank holds."""

    places: dict[str, Place]
    """By weight; weights of which it holds nothing may be missing."""
    sizes: list[int]
    """Elements of each flat tensor, padding included."""
    param_groups: list[list[int]]
    """The flat tensors of each of the optimizer's parameter groups."""


def layout_here(engine: Engine) -> Layout:
    """Of this rank, in the engine."""
    return _layout_here_stage3(engine) if engine.zero_optimization_partition_weights() else _layout_here(engine)


def saved_places(states: list[State], weights: list[dict[str, Any]] | None) -> dict[str, list[tuple[int, Place]]]:
    """(rank, place) of every weight, in the order of its elements.

    Args:
        states: by rank.
        weights: of stage 3: by flat tensor, the shapes of its weights by name.
    """
    if weights is not None:
        return _saved_places_stage3(len(states), weights)
    found: dict[str, list[tuple[int, Place]]] = {}
    for rank, state in enumerate(states):
        for group, mapping in enumerate(state["param_slice_mappings"]):
            for name, where in mapping.items():
                before = found.setdefault(name, [])
                offset = sum(place.length for _, place in before)
                before.append((rank, Place(group, offset, where.numel, where.start)))
    return found


def masters_of(state: State) -> list[Tensor]:
    """The flat fp32 weights."""
    return state["fp32_flat_groups"] if _is_stage3(state) else state["single_partition_of_fp32_groups"]  # type: ignore[no-any-return]


def moments_of(state: State) -> dict[int, dict[str, Tensor]]:
    """By flat tensor: Adam's moments, flat, and the scalar number of its steps."""
    return state["optimizer_state_dict" if _is_stage3(state) else "base_optimizer_state"]["state"]  # type: ignore[no-any-return]


def with_tensors(state: State, masters: list[Tensor], moments: dict[int, dict[str, Tensor]], layout: Layout) -> State:
    """The state with other tensors, of `layout`, in it."""
    if not _is_stage3(state):
        base = {**state["base_optimizer_state"], "state": moments}
        return {**state, "base_optimizer_state": base, "single_partition_of_fp32_groups": masters}
    saved_groups = state["optimizer_state_dict"]["param_groups"]
    groups = [{**group, "params": ids} for group, ids in zip(saved_groups, layout.param_groups, strict=True)]
    return {**state, "optimizer_state_dict": {"state": moments, "param_groups": groups}, "fp32_flat_groups": masters}


def _is_stage3(state: State) -> bool:
    return "fp32_flat_groups" in state


def _layout_here(engine: Engine) -> Layout:
    """Stage 1 in bf16 has an optimizer of its own, with other names."""
    optimizer = engine.optimizer
    own = not hasattr(optimizer, "bit16_groups")
    flat = optimizer.fp32_groups_flat_partition if own else optimizer.single_partition_of_fp32_groups
    places = {}
    for group, weights in enumerate(optimizer.bf16_groups if own else optimizer.bit16_groups):
        for weight in weights:
            mapping = weight._hp_mapping
            if mapping is not None:
                where = mapping.hp_fragment_address
                offset = mapping.lp_fragment_address.start
                places[engine.param_names[weight]] = Place(group, offset, where.numel, where.start)
    return Layout(places, [tensor.numel() for tensor in flat], [[group] for group in range(len(flat))])


def _layout_here_stage3(engine: Engine) -> Layout:
    import torch.distributed as dist

    optimizer, rank = engine.optimizer, dist.get_rank()
    places = {}
    param_groups: list[list[int]] = [[] for _ in optimizer.optimizer.param_groups]
    for group, weights in enumerate(optimizer.fp16_groups):
        start = 0
        param_groups[optimizer.sub_group_to_group_id[group]].append(group)
        for weight in weights:
            part = weight.partition_numel()
            places[engine.param_names[weight]] = _part(group, weight.ds_numel, part, rank, start)
            start += part
    return Layout(places, list(optimizer.fp16_partitioned_groups_flat_numel), param_groups)


def _saved_places_stage3(ranks: int, weights: list[dict[str, Any]]) -> dict[str, list[tuple[int, Place]]]:
    found = {}
    for group, shapes in enumerate(weights):
        start = 0
        for name, shape in shapes.items():
            part = -(-shape.numel() // ranks)
            found[name] = [(rank, _part(group, shape.numel(), part, rank, start)) for rank in range(ranks)]
            start += part
    return found


def _part(group: int, elements: int, part: int, rank: int, start: int) -> Place:
    """What `rank` has of a weight of `elements`, cut into parts of `part` elements with padding at the end."""
    offset = min(rank * part, elements)
    return Place(group, offset, min(part, elements - offset), start)
