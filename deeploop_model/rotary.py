"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves rotated against each other (GPT-NeoX form)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTable(NamedTuple):
    """cos and sin of position times frequency, each [T, head_dim] or [B, 1, T, head_dim]."""

    cos: Tensor
    sin: Tensor


def rotary_table(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> RotaryTable:
    """The table for positions [T] common to all sequences, or [B, T] of their own.

    Computed per forward pass instead of stored: a buffer would be cast to bf16 together with the weights, and bf16
    cannot tell position 257 from 258. `dtype` is float32, or float64 for a float64 model.
    """
    frequency = base ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angle = positions.to(torch.float64).unsqueeze(-1) * frequency
    angle = torch.cat((angle, angle), dim=-1)
    if angle.ndim == 3:
        angle = angle.unsqueeze(1)  # one table for all heads of a sequence
    return RotaryTable(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x_BHTC: Tensor, table: RotaryTable) -> Tensor:
    """Rotates queries or keys [B, H, T, head_dim] by their positions, in the table's precision."""
    first, second = x_BHTC.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BHTC * table.cos + turned * table.sin).to(x_BHTC.dtype)
