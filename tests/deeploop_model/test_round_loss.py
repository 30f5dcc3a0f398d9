"""Truncated back-propagation against manual detaching, and the loss of every round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deeploop_model import DeepLoopConfig, DeepLoopModel, ModelConfigError
from deeploop_model.recompute import POLICIES
from deeploop_model.round_loss import round_weights

BATCH = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(0))
HUGINN: dict[str, Any] = {"num_prelude_blocks": 1, "num_coda_blocks": 1, "injection": "concat-linear"}
VARIANTS: list[dict[str, Any]] = [{}, HUGINN, {"injection": "add", "round_embedding": True, "residual": "pre_ln"}]


def build(recompute: Any = "none", **fields: Any) -> DeepLoopModel:
    config = DeepLoopConfig(
        num_blocks=2, num_rounds=4, d_model=16, num_heads=2, vocab_size=37, context_length=12, **fields
    )
    return DeepLoopModel(config, seed=1, recompute=recompute).double()


def by_hand(model: DeepLoopModel, cut: int, weights: list[float]) -> torch.Tensor:
    """The loop written out, with a detach after round `cut`."""
    tokens, targets = BATCH[:, :-1], BATCH[:, 1:]
    sequence = model.sequence(tokens)
    e = x = model.enter(tokens, sequence)
    loss = torch.zeros((), dtype=torch.float64)
    for r, weight in enumerate(weights):
        u = None if model.round_embedding is None else model.round_embedding.weight[min(r, 3)]
        x = model.one_round(x, e, u, sequence)
        if r + 1 == cut:
            x = x.detach()
        if weight:
            logits = model.project(model.leave(x, sequence), sequence)
            loss = loss + weight * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss


@pytest.mark.parametrize(("fields", "recompute"), list(zip(VARIANTS * 2, POLICIES, strict=True)), ids=POLICIES)
@pytest.mark.parametrize(
    ("rounds", "backprop", "rule", "weights"),
    [
        (4, 2, "last", [0, 0, 0, 1]),
        (5, 1, "last", [0, 0, 0, 0, 1]),
        (3, 3, "linear", [1 / 6, 2 / 6, 3 / 6]),
        (4, None, "uniform", [1 / 4] * 4),
        (4, 2, "linear", [0, 0, 3 / 7, 4 / 7]),
        (3, 9, (1.0, 0.0, 3.0), [1 / 4, 0, 3 / 4]),
    ],
)
def test_loss_and_gradients_equal_those_of_the_loop_by_hand(
    rounds: int, backprop: int | None, rule: Any, weights: list[float], fields: dict[str, Any], recompute: Any
) -> None:
    model, reference = build(recompute, **fields), build(**fields)
    output = model(BATCH[:, :-1], BATCH[:, 1:], rounds, backprop_rounds=backprop, round_loss=rule)
    expected = by_hand(reference, max(0, rounds - (backprop or rounds)), weights)
    torch.testing.assert_close(output.loss, expected, rtol=1e-13, atol=0)
    output.loss.backward()
    expected.backward()  # type: ignore[no-untyped-call]
    for (name, weight), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None), name
        if weight.grad is not None and other.grad is not None:
            torch.testing.assert_close(weight.grad, other.grad, rtol=1e-10, atol=1e-16, msg=name)
    full = by_hand(reference, 0, [0.0] * (rounds - 1) + [1.0])
    torch.testing.assert_close(output.last_loss, full.detach(), rtol=1e-13, atol=0)
    assert not output.last_loss.requires_grad


def gradient(model: DeepLoopModel, name: str) -> torch.Tensor:
    grad = model.get_parameter(name).grad
    assert grad is not None
    return grad


def test_truncation_changes_the_gradient_and_not_the_loss() -> None:
    whole, cut = build(**HUGINN), build(**HUGINN)
    a = whole(BATCH[:, :-1], BATCH[:, 1:])
    b = cut(BATCH[:, :-1], BATCH[:, 1:], backprop_rounds=1)
    assert torch.equal(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    first, second = (gradient(model, "blocks.0.attention.qkv.weight") for model in (whole, cut))
    assert (first - second).norm() > 0.05 * first.norm()
    assert gradient(cut, "prelude.0.attention.qkv.weight").norm() > 0  # through the injection


def kept_bytes(policy: Any, rounds: int, **options: Any) -> int:
    """Bytes that autograd keeps after a forward pass."""
    model, stored = build(policy), {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(BATCH[:, :-1], BATCH[:, 1:], rounds, **options)
    assert output.loss is not None
    return sum(stored.values())


@pytest.mark.parametrize("policy", ["none", "round", "segment:2"])
def test_memory_of_truncated_backpropagation_does_not_grow_with_rounds(policy: Any) -> None:
    assert kept_bytes(policy, 8, backprop_rounds=2) == kept_bytes(policy, 4, backprop_rounds=2)


@pytest.mark.parametrize("policy", ["block", "round"])
def test_read_outs_are_recomputed_so_that_their_logits_are_not_kept(policy: Any) -> None:
    """Reading out every round keeps less than half of the five rounds' logits more than reading out the last."""
    logits = BATCH[:, 1:].numel() * build().config.vocab_size * 8
    more = kept_bytes(policy, 6, round_loss="uniform") - kept_bytes(policy, 6)
    assert more < 2.5 * logits  # five streams, of 16 numbers a token where logits have 37


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ((1.0, 1.0), "round_loss: 2 weights were given for 3 rounds"),
        ((1.0, 1.0, 0.0), "that of the last round more than 0"),
        ((1.0, -1.0, 1.0), "must be numbers of 0 or more"),
        ("all", "round_loss: 'all' is unknown; use last, uniform, linear or numbers"),
    ],
)
def test_impossible_weights(rule: Any, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        round_weights(rule, 3)


def test_no_round_to_go_back_through_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="backprop_rounds: 0 must be 1 or more"):
        build()(BATCH[:, :-1], BATCH[:, 1:], backprop_rounds=0)
