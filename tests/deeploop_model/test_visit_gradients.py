"""Visit gradients: exact sums however visits are reached, precision at many rounds, one hand-over, one buffer."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.allocation import allocated
from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.recompute import POLICIES
from deeploop_model.visit_gradients import VisitPass

SMALL: dict[str, Any] = {"num_blocks": 2, "num_rounds": 3, "d_model": 16, "num_heads": 2, "vocab_size": 37}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "num_prelude_blocks": 1, "num_coda_blocks": 2, "injection": "concat-linear", "feed_forward": "swiglu",
        "qk_norm": True, "round_embedding": True, "num_kv_heads": 1,
    },
    "pre_ln-untied": {"residual": "pre_ln", "injection": "add", "tie_embeddings": False},
}  # fmt: skip
PASSES: dict[str, dict[str, Any]] = {
    "last": {},
    "every-round": {"round_loss": "uniform"},
    "truncated": {"backprop_rounds": 2, "round_loss": "linear", "num_rounds": 5},
}


def batch(vocab_size: int = 37, sequences: int = 2, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, vocab_size, (sequences, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: DeepLoopModel, by_autograd: bool = False, **options: Any) -> dict[str, torch.Tensor | None]:
    """Of one pass; `by_autograd` leaves the summing over visits to autograd."""
    if by_autograd:
        with patch.object(VisitPass, "begin", lambda *args, **options: None):
            model(*batch(), **options).loss.backward()
    else:
        model(*batch(), **options).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_sums_are_those_of_autograd_and_handed_over_once(
    fields: dict[str, Any], options: dict[str, Any], policy: Any
) -> None:
    """In float64, with some weights frozen; a hook on a weight's gradient runs once, with all of it."""
    config = DeepLoopConfig(**{**SMALL, **fields})
    model = DeepLoopModel(config, seed=1, recompute=policy).double()
    for name in ("blocks.0.attention.qkv", "blocks.1.feed_forward_norm"):
        model.get_parameter(f"{name}.weight").requires_grad_(False)
    expected = gradients(copy.deepcopy(model), by_autograd=True, **options)
    handed: dict[str, int] = dict.fromkeys(expected, 0)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            count = lambda _, name=name: handed.update({name: handed[name] + 1})  # noqa: E731
            weight.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    for name, grad in gradients(model, **options).items():
        if expected[name] is None:
            assert grad is None, name
        else:
            torch.testing.assert_close(grad, expected[name], rtol=1e-11, atol=1e-16, msg=name)
        assert handed[name] == (expected[name] is not None), name


def relative_error(num_rounds: int, policy: Any = "none", by_autograd: bool = False) -> float:
    """Of the block's gradients in bf16 to those of the same weights in float64."""
    config = DeepLoopConfig(
        num_blocks=1, num_rounds=num_rounds, d_model=64, num_heads=4, vocab_size=500, context_length=64
    )
    low = DeepLoopModel(config, seed=3, recompute=policy).bfloat16()
    exact = copy.deepcopy(low).double()
    tokens, targets = batch(500, 4, 64)
    exact(tokens, targets).loss.backward()
    if by_autograd:
        with patch.object(VisitPass, "begin", lambda *args, **options: None):
            low(tokens, targets).loss.backward()
    else:
        low(tokens, targets).loss.backward()
    wrong, right = (
        torch.cat([w.grad.double().flatten() for w in model.blocks.parameters() if w.grad is not None])
        for model in (low, exact)
    )
    return float((wrong - right).norm() / right.norm())


def test_error_is_flat_in_rounds_where_that_of_a_bf16_sum_grows() -> None:
    one = relative_error(1)
    assert one < 0.006
    for rounds in (8, 16, 32, 64):
        assert relative_error(rounds) < 1.1 * one, rounds
    assert relative_error(64, policy="round") < 1.1 * one
    assert relative_error(64, by_autograd=True) > 4 * one


def test_memory_of_gradients_is_one_float32_buffer_whatever_the_rounds() -> None:
    """Few tokens and wide matrices, so that gradients are nearly all that is allocated."""
    peaks = []
    for rounds in (3, 16):
        config = DeepLoopConfig(**{**SMALL, "d_model": 256, "num_rounds": rounds})
        model = DeepLoopModel(config, recompute="block").bfloat16()
        tokens, targets = batch(sequences=1, length=2)
        model(tokens, targets).loss.backward()  # .grad exists from here on
        looped = sum(w.numel() for w in model.blocks.parameters())
        largest = max(w.numel() for w in model.blocks.parameters())
        peaks.append(allocated(lambda model=model, data=(tokens, targets): model(*data).loss.backward).peak)  # type: ignore[misc]
        # Besides the buffers: one gradient on its way to one, and one on its way to .grad, in bf16; and small change.
        assert peaks[-1] < 4 * looped + 2 * 2 * largest + 0.15 * looped
    assert peaks[1] - peaks[0] < 0.1 * 4 * looped


def test_passes_that_overlap_do_not_mix() -> None:
    """Two forward passes, then their backward passes in either order; and one backward pass twice."""
    model = DeepLoopModel(DeepLoopConfig(**SMALL), recompute="block").double()
    weight = model.get_parameter("blocks.0.feed_forward.up.weight")
    tokens, targets = batch()

    def gradient(*losses: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        for loss in losses:
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return weight.grad.clone()

    first, second = model(tokens, targets).loss, model(targets, tokens).loss
    with torch.no_grad():
        model(tokens, targets)
    alone = [gradient(first), gradient(second)]
    assert not torch.allclose(alone[0], alone[1])
    torch.testing.assert_close(gradient(first, second), alone[0] + alone[1])
    torch.testing.assert_close(gradient(second, first), alone[0] + alone[1])
    torch.testing.assert_close(gradient(first, first), 2 * alone[0])


def test_model_can_be_copied_and_stored_after_a_pass() -> None:
    model = DeepLoopModel(DeepLoopConfig(**SMALL))
    first = gradients(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        other.zero_grad()
        again = gradients(other)
        assert all(torch.equal(a, b) for a, b in zip(first.values(), again.values(), strict=True) if a is not None)  # type: ignore[arg-type]
