"""L2 norms of the global batch's gradient by part of the model: as DeepSpeed has reduced it, before clipping."""

from __future__ import annotations

import torch

from pretrain.engine import Engine


def gradient_norms(engine: Engine) -> dict[str, float]:
    """By part, as in `blocks.0.attention` or `embedding`; every rank must call it between backward and update.

    One weight's gradient at a time is put together from the ranks' shares in float32. Under ZeRO-1, 2 and 3, with
    optimizer state in host memory or not. Squares of the norms add up to that of the global norm.
    """
    from deepspeed.utils import safe_get_full_grad

    squares: dict[str, torch.Tensor] = {}
    for name, weight in engine.module.named_parameters():
        if weight.requires_grad:
            gradient = safe_get_full_grad(weight)
            square = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
            part = part_of(name)
            squares[part] = squares[part] + square if part in squares else square
    return {part: float(square.sqrt()) for part, square in squares.items()}


def part_of(weight: str) -> str:
    """The sub-layer of a block with its norm, or the module outside of blocks, that a weight's name says it is in."""
    first, *rest = weight.split(".")
    if first not in ("prelude", "blocks", "coda"):
        return first
    number, layer, *_ = rest
    return f"{first}.{number}.{layer.removesuffix('_norm')}"
