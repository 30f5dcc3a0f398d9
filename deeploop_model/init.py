"""Initial weights: every matrix, its fans and its gain, in one table.

| matrix                        | fans (out, in)     | gain                 |
|-------------------------------|--------------------|----------------------|
| query                         | d, d               | 1                    |
| key                           | G*head_dim, d      | 1                    |
| value                         | G*head_dim, d      | beta                 |
| attention output              | d, d               | beta * output_gain   |
| feed-forward gate (SwiGLU)    | F, d               | 1                    |
| feed-forward up               | F, d               | beta * swiglu_gain   |
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
matrices. With beta on all three the branch would start at beta^3, far below the 1/(4N) per visit that the rule is
about. `swiglu_gain`, about 1.1 with Xavier and 1 for GELU, makes the branch start exactly as large as the GELU branch
of as many weights: with Xavier 0.40 beta^2 on a stream of unit RMS, for small beta.

The concat-linear adapter is no residual branch: it replaces the stream, and beta would shrink that, not a change to
it. With Xavier its output has RMS sqrt(4/3) for two independent inputs of RMS 1, before its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from numpy.polynomial.hermite_e import hermegauss
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
        yield InitialMatrix("injection.linear", adapter, base_std(model.config, *adapter.shape))
    up_gain = swiglu_gain(model.config)
    for part, stack in (("prelude", model.prelude), ("blocks", model.blocks), ("coda", model.coda)):
        for index, block in enumerate(stack):
            assert isinstance(block, Block)
            for name, weight_OI, gain in block_matrices(block, up_gain):
                yield InitialMatrix(
                    f"{part}.{index}.{name}", weight_OI, gain * base_std(model.config, *weight_OI.shape)
                )


def block_matrices(block: Block, up_gain: float) -> Iterator[tuple[str, Tensor, float]]:
    """(name, weight, gain) of the matrices of one block."""
    rule, attention, feed_forward = block.rule, block.attention, block.feed_forward
    query, key, value = torch.split(attention.qkv.weight, attention.qkv_rows)
    yield "attention.query", query, 1.0
    yield "attention.key", key, 1.0
    yield "attention.value", value, rule.beta
    yield "attention.output", attention.output.weight, rule.beta * rule.output_gain
    if feed_forward.gate is not None:
        yield "feed_forward.gate", feed_forward.gate.weight, 1.0
    yield "feed_forward.up", feed_forward.up.weight, rule.beta * up_gain
    yield "feed_forward.down", feed_forward.down.weight, rule.beta * rule.output_gain


def swiglu_gain(config: DeepLoopConfig) -> float:
    """RMS of the GELU branch over that of the SwiGLU branch with as many weights; 1 where the branch is GELU.

    Both on a stream of unit RMS, in expectation over the weights: products with it are then normal, and
    E[down(h)^2] is the sum over the width of E[h^2] times the square of down's spread.
    """
    if config.feed_forward == "gelu":
        return 1.0
    d, swiglu_width = config.d_model, config.feed_forward_width
    gelu_width = 3 * swiglu_width // 2
    into, gate = (base_std(config, width, d) * d**0.5 for width in (gelu_width, swiglu_width))
    gelu = normal_mean_square(lambda z: F.gelu(z, approximate="tanh"), config.rule.beta * into)
    swiglu = normal_mean_square(F.silu, gate) * (config.rule.beta * gate) ** 2
    gelu *= gelu_width * base_std(config, d, gelu_width) ** 2
    swiglu *= swiglu_width * base_std(config, d, swiglu_width) ** 2
    return float((gelu / swiglu) ** 0.5)


def normal_mean_square(f: Callable[[Tensor], Tensor], std: float) -> float:
    """E[f(z)^2] for z ~ N(0, std^2), by Gauss-Hermite quadrature."""
    points, weights = (torch.from_numpy(array) for array in hermegauss(64))
    return float((weights * f(std * points).square()).sum() / weights.sum())


def base_std(config: DeepLoopConfig, fan_out: int, fan_in: int) -> float:
    """Standard deviation of a matrix with gain 1."""
    if config.init == "normal_0.02":
        return 0.02
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
