"""Initial weights: every matrix, its fans and its gain, in one table.

| matrix                        | fans (out, in)     | gain                 |
|-------------------------------|--------------------|----------------------|
| query                         | d, d               | 1                    |
| key                           | G*head_dim, d      | 1                    |
| value                         | G*head_dim, d      | beta                 |
| attention output              | d, d               | beta * output_gain   |
| feed-forward gate (SwiGLU)    | F, d               | 1                    |
| feed-forward up               | F, d               | beta                 |
| feed-forward down             | d, F               | beta * output_gain   |
| injection, concat-linear      | d, 2d              | 1                    |
| embeddings, output head       | -                  | N(0, 0.02^2) (GPT-2) |
| round embedding               | -                  | zeros                |
| RMSNorm weight                | -                  | all ones             |

G key-value heads, F the feed-forward width. Standard deviation: gain * sqrt(2 / (fan_in + fan_out)) (Xavier normal,
Glorot and Bengio 2010), or gain * 0.02. The query, key and value rows of the fused matrix are initialised as matrices
of their own: neither beta nor the fans of the fused matrix may reach query and key.

SwiGLU has three matrices: down(SiLU(gate x) * up x). The gate keeps gain 1, as query and key do and for the same
reason: it selects, and the path that carries values, up then down, is linear, with one beta for each of its two
matrices. The branch then starts at beta^2 times its size at beta = 1, as attention does exactly, and the GELU branch
in GELU's linear regime; its derivative by up and down is of order beta, as GELU's. With beta on all three it would
start at beta^3, far below the 1/(4N) per visit that the rule is about. With Xavier and the default widths the constant
is about 0.36 beta^2 for SwiGLU and 0.40 beta^2 for GELU, on a stream of unit RMS.

The concat-linear adapter is no residual branch: it replaces the stream, and beta would shrink that, not a change to
it. With Xavier its output has RMS sqrt(4/3) for two independent inputs of RMS 1, before its norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from deeploop_model.blocks import Block
from deeploop_model.config import DeepLoopConfig
from deeploop_model.norm import RMSNorm

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
    if model.position_embedding is not None:
        yield InitialMatrix("position_embedding", model.position_embedding.weight, EMBEDDING_STD)
    if model.round_embedding is not None:
        yield InitialMatrix("round_embedding", model.round_embedding.weight, 0.0)
    if model.injection is not None and model.injection.linear is not None:
        adapter = model.injection.linear.weight
        yield InitialMatrix("injection.linear", adapter, base_std(model.config, adapter))
    for part, stack in (("prelude", model.prelude), ("blocks", model.blocks), ("coda", model.coda)):
        for index, block in enumerate(stack):
            assert isinstance(block, Block)
            for name, weight_OI, gain in block_matrices(block):
                yield InitialMatrix(f"{part}.{index}.{name}", weight_OI, gain * base_std(model.config, weight_OI))


def block_matrices(block: Block) -> Iterator[tuple[str, Tensor, float]]:
    """(name, weight, gain) of the matrices of one block."""
    rule, attention, feed_forward = block.rule, block.attention, block.feed_forward
    query, key, value = torch.split(attention.qkv.weight, attention.qkv_rows)
    yield "attention.query", query, 1.0
    yield "attention.key", key, 1.0
    yield "attention.value", value, rule.beta
    yield "attention.output", attention.output.weight, rule.beta * rule.output_gain
    if feed_forward.gate is not None:
        yield "feed_forward.gate", feed_forward.gate.weight, 1.0
    yield "feed_forward.up", feed_forward.up.weight, rule.beta
    yield "feed_forward.down", feed_forward.down.weight, rule.beta * rule.output_gain


def base_std(config: DeepLoopConfig, weight_OI: Tensor) -> float:
    """Standard deviation of a matrix with gain 1."""
    if config.init == "normal_0.02":
        return 0.02
    fan_out, fan_in = weight_OI.shape
    return float((2.0 / (fan_in + fan_out)) ** 0.5)


@torch.no_grad()
def initialise(model: DeepLoopModel, seed: int) -> None:
    """Draws all weights from one generator seeded with `seed`: equal on every rank and device.

    A model on the meta device has shapes but no weights, and nothing is drawn for it.
    """
    if model.embedding.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(seed)
    for matrix in initial_matrices(model):
        draw = torch.randn(matrix.weight_OI.shape, generator=generator)
        matrix.weight_OI.copy_(draw * matrix.std)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
