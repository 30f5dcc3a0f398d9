"""Initial weights: every matrix, its fans and its gain, in one table.

| matrix                  | fans (out, in) | gain                 |
|-------------------------|----------------|----------------------|
| query, key              | d, d           | 1                    |
| value                   | d, d           | beta                 |
| attention output        | d, d           | beta * output_gain   |
| feed-forward up         | 4d, d          | beta                 |
| feed-forward down       | d, 4d          | beta * output_gain   |
| embedding, output head  | -              | N(0, 0.02^2) (GPT-2) |
| RMSNorm weight          | -              | all ones             |

Standard deviation: gain * sqrt(2 / (fan_in + fan_out)) (Xavier normal, Glorot and Bengio 2010), or gain * 0.02. The
value rows of the fused query-key-value matrix are initialised as a d x d matrix of their own: neither beta nor the
fans of the fused matrix may reach query and key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from deeploop_model.blocks import Block, RMSNorm
from deeploop_model.config import DeepLoopConfig

if TYPE_CHECKING:
    from deeploop_model.model import DeepLoopModel

EMBEDDING_STD = 0.02


class InitialMatrix(NamedTuple):
    """One matrix (a view of stored weights) and the standard deviation that it starts with."""

    name: str
    weight_OI: Tensor
    std: float


def initial_matrices(model: DeepLoopModel) -> Iterator[InitialMatrix]:
    """Every matrix of the model, in the order in which it is drawn."""
    yield InitialMatrix("embedding", model.embedding.weight, EMBEDDING_STD)
    if model.head is not None:
        yield InitialMatrix("head", model.head.weight, EMBEDDING_STD)
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for name, weight_OI, gain in block_matrices(block):
            yield InitialMatrix(f"blocks.{index}.{name}", weight_OI, gain * base_std(model.config, weight_OI))


def block_matrices(block: Block) -> Iterator[tuple[str, Tensor, float]]:
    """(name, weight, gain) of the matrices of one block."""
    rule = block.rule
    query, key, value = block.attention.qkv.weight.chunk(3)
    yield "attention.query", query, 1.0
    yield "attention.key", key, 1.0
    yield "attention.value", value, rule.beta
    yield "attention.output", block.attention.output.weight, rule.beta * rule.output_gain
    yield "feed_forward.up", block.feed_forward.up.weight, rule.beta
    yield "feed_forward.down", block.feed_forward.down.weight, rule.beta * rule.output_gain


def base_std(config: DeepLoopConfig, weight_OI: Tensor) -> float:
    """Standard deviation of a matrix with gain 1."""
    if config.init == "normal_0.02":
        return 0.02
    fan_out, fan_in = weight_OI.shape
    return float((2.0 / (fan_in + fan_out)) ** 0.5)


@torch.no_grad()
def initialise(model: DeepLoopModel, seed: int) -> None:
    """Draws all weights from one generator seeded with `seed`: equal on every rank and device."""
    generator = torch.Generator().manual_seed(seed)
    for matrix in initial_matrices(model):
        draw = torch.randn(matrix.weight_OI.shape, generator=generator)
        matrix.weight_OI.copy_(draw * matrix.std)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
