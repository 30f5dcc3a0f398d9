"""alpha, beta and the norm's place against the formulas, written out as numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel, ExponentRule, ModelConfigError, residual_rule
from deeploop_model.blocks import Block
from deeploop_model.residual import RuleName


@pytest.mark.parametrize(
    ("residual", "depth", "alpha", "beta"),
    [
        ("deeploop", 8, 4.0, 0.125),
        ("deeploop", 1, math.sqrt(2), 1 / math.sqrt(8)),
        ("deeploop", 168, math.sqrt(336), 1 / math.sqrt(1344)),
        ("deepnorm", 8, 2.0, 8**-0.5),
        ("deepnorm", 2, 4**0.25, 0.5),
        ("post_ln", 8, 1.0, 1.0),
        (ExponentRule(p=0.25), 8, 2.0, 8**-0.5),
        (ExponentRule(p=0.5, c=1.0, d=4.0), 9, 3.0, 1 / 6),
        (ExponentRule(p=0.0), 8, 1.0, 1.0),
    ],
)
def test_rules_with_norm_after(residual: RuleName | ExponentRule, depth: int, alpha: float, beta: float) -> None:
    rule = residual_rule(residual, depth)
    assert rule.alpha == pytest.approx(alpha, rel=1e-14)
    assert rule.beta == pytest.approx(beta, rel=1e-14)
    assert (rule.norm, rule.output_gain) == ("after", 1.0)


def test_deeploop_branch_is_a_4nth_of_the_skip() -> None:
    rule = residual_rule("deeploop", 24)
    assert rule.beta / rule.alpha == pytest.approx(1 / (4 * 24))


def test_pre_ln_scales_output_matrices_as_gpt2() -> None:
    rule = residual_rule("pre_ln", 8)
    assert (rule.alpha, rule.beta, rule.norm) == (1.0, 1.0, "before")
    assert rule.output_gain == pytest.approx(1 / 4)


@pytest.mark.parametrize(("blocks", "rounds"), [(8, 1), (2, 4), (1, 8)])
def test_rule_depends_on_unrolled_depth_only(blocks: int, rounds: int) -> None:
    config = DeepLoopConfig(num_blocks=blocks, num_rounds=rounds)
    assert (config.unrolled_depth, config.num_visits) == (8, 16)
    assert config.rule == residual_rule(ExponentRule(p=0.5), 8)


@pytest.mark.parametrize(
    ("fields", "depth"),
    [
        ({"num_prelude_blocks": 2, "num_blocks": 4, "num_rounds": 8, "num_coda_blocks": 2}, 36),
        ({"num_prelude_blocks": 1, "num_blocks": 1, "num_rounds": 5}, 6),
        ({"num_blocks": 3, "num_rounds": 2, "num_coda_blocks": 1, "injection": "concat-linear"}, 7),
    ],
)
def test_depth_counts_every_visit_the_model_makes(fields: dict[str, Any], depth: int) -> None:
    """N = P + K*R + C, counted on a forward pass; injection is no visit; every block uses the same alpha and beta."""
    config = DeepLoopConfig(d_model=16, num_heads=2, vocab_size=8, context_length=4, **fields)
    model = DeepLoopModel(config)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    visits = []
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: visits.append(1))
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert (len(visits), config.unrolled_depth, config.num_visits) == (depth, depth, 2 * depth)
    for block in blocks:
        assert block.rule.alpha == pytest.approx(math.sqrt(2 * depth))
        assert block.rule.beta == pytest.approx(1 / math.sqrt(8 * depth))


@pytest.mark.parametrize("bad", ["deeplop", None, 0.5])
def test_unknown_rule(bad: object) -> None:
    with pytest.raises(ModelConfigError, match=r"residual: .* is unknown; use deeploop"):
        residual_rule(bad, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"p": -0.1}, {"p": math.nan}, {"p": 0.5, "c": 0.0}, {"p": 0.5, "d": math.inf}])
def test_impossible_exponents(fields: dict[str, float]) -> None:
    with pytest.raises(ModelConfigError, match="residual\\."):
        ExponentRule(**fields)


@pytest.mark.parametrize("rule", [ExponentRule(p=1000.0), ExponentRule(p=1000.0, c=1e-3, d=1e-3)])
def test_exponents_that_leave_the_range_of_numbers(rule: ExponentRule) -> None:
    with pytest.raises(ModelConfigError, match=r"residual\.p: 1000\.0 makes alpha or beta too large"):
        residual_rule(rule, 8)
