"""The measured spread of every initial matrix against the formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deeploop_model import DeepLoopConfig, DeepLoopModel, ExponentRule

D = 96
SHAPES = [(1, 1), (2, 4), (3, 2), (1, 16)]
RULES: list[Any] = ["deeploop", "deepnorm", "post_ln", "pre_ln", ExponentRule(p=0.45)]


def build(**fields: Any) -> DeepLoopModel:
    return DeepLoopModel(DeepLoopConfig(d_model=D, num_heads=4, vocab_size=700, context_length=8, **fields), seed=1)


def assert_spread(weight: Tensor, std: float) -> None:
    """Sample deviation of n normal numbers: standard error std / sqrt(2n); five of them are allowed."""
    n = weight.numel()
    assert weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n))
    assert abs(weight.mean().item()) < 5 * std / math.sqrt(n)


@pytest.mark.parametrize(("blocks", "rounds"), SHAPES)
@pytest.mark.parametrize("residual", RULES, ids=str)
def test_xavier_spread_of_every_matrix(blocks: int, rounds: int, residual: Any) -> None:
    model = build(num_blocks=blocks, num_rounds=rounds, residual=residual)
    n = blocks * rounds
    beta = {"deeploop": (8 * n) ** -0.5, "deepnorm": (8 * n) ** -0.25, "post_ln": 1.0, "pre_ln": 1.0}.get(
        str(residual), (8 * n) ** -0.45
    )
    output = (2 * n) ** -0.5 if residual == "pre_ln" else 1.0
    square, feed_forward = math.sqrt(1 / D), math.sqrt(2 / (5 * D))
    weights = model.state_dict()
    for k in range(blocks):
        query, key, value = weights[f"blocks.{k}.attention.qkv.weight"].split(D)
        assert_spread(query, square)
        assert_spread(key, square)
        assert_spread(value, beta * square)
        assert_spread(weights[f"blocks.{k}.attention.output.weight"], beta * output * square)
        assert_spread(weights[f"blocks.{k}.feed_forward.up.weight"], beta * feed_forward)
        assert_spread(weights[f"blocks.{k}.feed_forward.down.weight"], beta * output * feed_forward)
    assert_spread(weights["embedding.weight"], 0.02)


def test_gpt2_base_initialiser() -> None:
    weights = build(num_blocks=1, num_rounds=4, init="normal_0.02").state_dict()
    query, key, value = weights["blocks.0.attention.qkv.weight"].split(D)
    assert_spread(query, 0.02)
    assert_spread(key, 0.02)
    for scaled in (value, weights["blocks.0.attention.output.weight"], weights["blocks.0.feed_forward.up.weight"]):
        assert_spread(scaled, 0.02 / math.sqrt(32))


def test_every_weight_is_covered() -> None:
    """No parameter keeps torch's own initial values: two models of one seed agree, those of another seed don't."""
    first, same, other = (
        DeepLoopModel(
            DeepLoopConfig(
                num_blocks=2, d_model=32, num_heads=2, vocab_size=64, context_length=8, tie_embeddings=False
            ),
            seed=s,
        )
        for s in (3, 3, 4)
    )
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name]), name
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            assert not torch.equal(weight, other.state_dict()[name]), name


def test_untied_head_has_its_own_matrix() -> None:
    weights = build(num_blocks=1, tie_embeddings=False).state_dict()
    assert_spread(weights["head.weight"], 0.02)
    assert not torch.equal(weights["head.weight"], weights["embedding.weight"])
