"""The measured spread of every initial matrix against the formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deeploop_model import DeepLoopConfig, DeepLoopModel, ExponentRule
from deeploop_model.blocks import Block
from deeploop_model.config import FeedForwardKind
from deeploop_model.init import swiglu_gain

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


def test_spread_under_grouped_queries_swiglu_prelude_and_adapter() -> None:
    """Key and value have fans of their own, the gate keeps gain 1, and prelude and coda share the loop's beta."""
    model = build(
        num_blocks=1, num_rounds=4, num_prelude_blocks=1, num_coda_blocks=2, num_kv_heads=2, feed_forward="swiglu",
        injection="concat-linear", position="learned",
    )  # fmt: skip
    beta, ff = (8 * 7) ** -0.5, model.config.feed_forward_width
    assert ff == 256
    up = swiglu_gain(model.config) * beta * math.sqrt(2 / (D + ff))
    weights = model.state_dict()
    for block in ("prelude.0", "blocks.0", "coda.0", "coda.1"):
        query, key, value = weights[f"{block}.attention.qkv.weight"].split([D, D // 2, D // 2])
        assert_spread(query, math.sqrt(1 / D))
        assert_spread(key, math.sqrt(2 / (1.5 * D)))
        assert_spread(value, beta * math.sqrt(2 / (1.5 * D)))
        assert_spread(weights[f"{block}.attention.output.weight"], beta * math.sqrt(1 / D))
        assert_spread(weights[f"{block}.feed_forward.gate.weight"], math.sqrt(2 / (D + ff)))
        assert_spread(weights[f"{block}.feed_forward.up.weight"], up)
        assert_spread(weights[f"{block}.feed_forward.down.weight"], beta * math.sqrt(2 / (D + ff)))
    assert_spread(weights["injection.linear.weight"], math.sqrt(2 / (3 * D)))
    assert_spread(weights["position_embedding.weight"], 0.02)


@pytest.mark.parametrize("rounds", [1, 8, 512])
@pytest.mark.parametrize("fields", [{}, {"d_ff": 320}, {"residual": "pre_ln"}, {"init": "normal_0.02"}], ids=str)
def test_swiglu_branch_starts_as_large_as_the_gelu_branch_of_as_many_weights(
    rounds: int, fields: dict[str, Any]
) -> None:
    """Measured RMS of both branches on a stream of unit RMS, at every depth, width, rule and base initialiser."""
    d = 240
    x = torch.randn(256, d, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    sizes = {}
    kinds: list[tuple[FeedForwardKind, int]] = [("swiglu", 2), ("gelu", 3)]
    for kind, wider in kinds:
        own = {**fields, "d_ff": fields.get("d_ff", 8 * d // 3) * wider // 2}
        config = DeepLoopConfig(
            num_blocks=1, num_rounds=rounds, d_model=d, num_heads=4, vocab_size=8, context_length=8,
            feed_forward=kind, **own,
        )  # fmt: skip
        block = DeepLoopModel(config, seed=4).double().blocks[0]
        assert isinstance(block, Block)
        with torch.no_grad():
            sizes[kind] = float(block.feed_forward(x).square().mean().sqrt())
    assert sizes["swiglu"] == pytest.approx(sizes["gelu"], rel=0.015)
    if not fields and rounds == 512:
        assert sizes["gelu"] == pytest.approx(0.40 * config.rule.beta**2, rel=0.02)


def test_a_model_on_the_meta_device_draws_nothing() -> None:
    with torch.device("meta"):
        model = DeepLoopModel(DeepLoopConfig(d_model=1 << 14, num_heads=128, num_blocks=1))
    assert all(weight.is_meta for weight in model.parameters())


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
