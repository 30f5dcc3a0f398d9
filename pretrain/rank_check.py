"""Whether all data-parallel ranks hold the same weights: a difference means that memory or a link corrupts data."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.errors import RanksDifferError


def compare_ranks(module: nn.Module, step: int) -> None:
    """Raises RanksDifferError, on all ranks, where a weight's bytes are not the same everywhere.

    Every rank must call it. ZeRO-3 cuts the weights themselves, so that there is nothing to compare.
    """
    weights = {name: weight for name, weight in module.named_parameters() if not hasattr(weight, "ds_id")}
    mine = {name: digest(weight) for name, weight in weights.items()}
    all_ranks: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    for name in mine:
        found = [theirs[name] for theirs in all_ranks]
        if len(set(found)) > 1:
            usual = max(found, key=found.count)
            odd = [str(rank) for rank, value in enumerate(found) if value != usual]
            which = (
                f"rank {', '.join(odd)} differs" if 2 * len(odd) < len(found) else "no majority tells which is right"
            )
            raise RanksDifferError(
                f"after step {step}, {name} is not the same on all ranks: {which}; memory or a link corrupts data, "
                "find the node, take it out of service and resume from an earlier checkpoint"
            )


def digest(weight: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    plain = weight.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(plain.tobytes()).hexdigest()
