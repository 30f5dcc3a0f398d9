"""kappa_R: its limits on constructed gradients, and a real model against one gradient per visit by brute force."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.visit_alignment import measured_visits
from deeploop_model.visit_gradients import Linear, VisitNorms, VisitPass

BATCH = torch.randint(0, 37, (2, 10), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rounds", [1, 4, 9])
def test_one_for_orthogonal_and_r_for_identical_visits(rounds: int) -> None:
    """y = sum_r <W x_r, c_r>: the gradient of visit r is the outer product of c_r and x_r."""
    linear = Linear(12, 5)
    basis = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0)))[0]

    def kappa(inputs: list[torch.Tensor], factors: list[float]) -> float:
        norms = linear.visited.norms = VisitNorms()
        visits = VisitPass()
        total = torch.zeros(())
        for x, factor in zip(inputs, factors, strict=True):
            visits.begin(linear)
            total = total + factor * linear(x[None]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        assert norms.of_sums is not None
        assert norms.of_visits is not None
        return float(norms.of_sums / norms.of_visits)

    assert kappa(list(basis[:rounds]), [1.0] * rounds) == pytest.approx(1, rel=1e-5)
    assert kappa([basis[0]] * rounds, [1.0] * rounds) == pytest.approx(rounds, rel=1e-5)
    if rounds == 4:
        assert kappa([basis[0]] * 4, [1.0, -1.0, 1.0, -1.0]) == pytest.approx(0, abs=1e-5)


def unrolled(model: DeepLoopModel) -> DeepLoopModel:
    """A copy of each block per round, so that autograd holds each visit's gradient."""
    config = model.config
    untied = DeepLoopModel(dataclasses.replace(config, num_blocks=config.num_blocks * config.num_rounds, num_rounds=1))
    weights = {name: w for name, w in model.state_dict().items() if not name.startswith("blocks.")}
    for visit in range(untied.config.num_blocks):
        block = model.blocks[visit % config.num_blocks]
        weights |= {f"blocks.{visit}.{name}": w for name, w in block.state_dict().items()}
    untied.double().load_state_dict(weights)
    return untied


@pytest.mark.parametrize("fields", [{}, {"residual": "pre_ln", "feed_forward": "swiglu"}], ids=["deeploop", "swiglu"])
def test_equals_brute_force_over_two_micro_batches(fields: dict[str, Any]) -> None:
    config = DeepLoopConfig(
        num_blocks=2, num_rounds=3, d_model=16, num_heads=2, vocab_size=37, context_length=12, **fields
    )
    model = DeepLoopModel(config, seed=1, recompute="round").double()
    model.get_parameter("blocks.1.feed_forward.up.weight").requires_grad_(False)
    with measured_visits(model) as alignment:
        for rows in BATCH:
            model(rows[None, :-1], rows[None, 1:]).loss.backward()
    model(BATCH[:, :-1], BATCH[:, 1:]).loss.backward()  # not measured
    found = alignment.of(alignment.squares())

    of_sums: dict[str, float] = {}
    of_visits: dict[str, float] = {}
    for rows in BATCH:
        untied = unrolled(model)
        untied(rows[None, :-1], rows[None, 1:]).loss.backward()
        for name, weight in model.named_parameters():
            part, k, layer, *rest = name.split(".")[:4] if name.startswith("blocks.") else ["", "", "", ""]
            if part and layer in ("attention", "feed_forward") and weight.requires_grad:
                key = f"blocks.{k}.{layer}"
                copies = [f"blocks.{r * 2 + int(k)}.{layer}.{rest[0]}.weight" for r in range(3)]
                grads = [untied.get_parameter(copy).grad for copy in copies]
                stacked = torch.stack([grad for grad in grads if grad is not None])
                of_sums[key] = of_sums.get(key, 0) + float(stacked.sum(0).square().sum())
                of_visits[key] = of_visits.get(key, 0) + float(stacked.square().sum())
    assert found.keys() == of_sums.keys()
    for key, (kappa, stability) in found.items():
        assert kappa == pytest.approx(of_sums[key] / of_visits[key], rel=1e-9)
        factor = config.num_visits * (config.rule.beta / config.rule.alpha) ** 2
        assert stability == pytest.approx(kappa * factor, rel=1e-12)
        assert 0 < kappa < 3


def test_sub_layer_without_gradients_is_left_out() -> None:
    config = DeepLoopConfig(num_blocks=1, num_rounds=2, d_model=16, num_heads=2, vocab_size=37, context_length=12)
    model = DeepLoopModel(config)
    model.blocks[0].attention.requires_grad_(False)
    with measured_visits(model) as alignment:
        model(BATCH[:, :-1], BATCH[:, 1:]).loss.backward()
    assert list(alignment.of(alignment.squares())) == ["blocks.0.feed_forward"]
