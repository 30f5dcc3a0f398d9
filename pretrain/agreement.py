"""What all ranks must know after every step, in one small all-reduce."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Agreed(NamedTuple):
    """The same on every rank."""

    loss: float
    """The mean over ranks, summed in float64; not finite where one rank's is not."""
    stop: bool
    """Some rank was asked to stop."""
    written: bool
    """Every rank has written its part of the checkpoint under way."""


def agree(loss: Tensor, *, stop: bool, written: bool) -> Agreed:
    """Every rank must call it after each step, with its own mean loss, a scalar on the rank's device."""
    told = torch.tensor([0.0, stop, written], dtype=torch.float64, device=loss.device)
    told[0] = loss.detach().double()
    dist.all_reduce(told)
    total, stops, writes = told.tolist()
    return Agreed(total / dist.get_world_size(), stops > 0, int(writes) == dist.get_world_size())
