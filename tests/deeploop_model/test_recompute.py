"""Recomputation changes memory and work, never a result."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel, ModelConfigError
from deeploop_model.recompute import POLICIES, RecomputePolicy

CONFIG = DeepLoopConfig(num_blocks=2, num_rounds=4, d_model=16, num_heads=2, vocab_size=37, context_length=12)
BATCH = torch.randint(0, 37, (3, 13), generator=torch.Generator().manual_seed(0))


def backward(policy: RecomputePolicy, **model_options: Any) -> tuple[torch.Tensor, DeepLoopModel, Counter[int]]:
    model = DeepLoopModel(CONFIG, seed=1, recompute=policy).double()
    calls: Counter[int] = Counter()
    for k, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, k=k: calls.update([k]))
    loss = model(BATCH[:, :-1], BATCH[:, 1:]).loss
    loss.backward()
    return loss, model, calls


@pytest.mark.parametrize("policy", ["block", "round"])
def test_gradients_equal_those_without_recomputation_bit_by_bit(policy: RecomputePolicy) -> None:
    plain_loss, plain, _ = backward("none")
    loss, model, _ = backward(policy)
    assert torch.equal(loss, plain_loss)
    for (name, weight), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert weight.grad is not None
        assert expected.grad is not None
        assert torch.equal(weight.grad, expected.grad), name


@pytest.mark.parametrize(("policy", "forwards"), [("none", 1), ("block", 2), ("round", 2)])
def test_each_visit_is_computed_again_once(policy: RecomputePolicy, forwards: int) -> None:
    _, _, calls = backward(policy)
    assert calls == {0: 4 * forwards, 1: 4 * forwards}


def kept_bytes(policy: RecomputePolicy, num_rounds: int) -> int:
    """Bytes that the forward pass keeps for the backward pass, weights left out."""
    model = DeepLoopModel(CONFIG, recompute=policy)
    weights = {w.untyped_storage().data_ptr() for w in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(BATCH[:, :-1], BATCH[:, 1:], num_rounds=num_rounds)
    assert output.loss is not None
    return sum(kept.values())


def test_a_round_costs_one_stream_under_round_and_one_per_block_under_block() -> None:
    stream = 3 * 12 * 16 * 4
    none, block, round_ = (kept_bytes(policy, 9) - kept_bytes(policy, 8) for policy in ("none", "block", "round"))
    assert round_ <= 1.05 * stream
    assert block <= 2 * 1.05 * stream
    assert none > 10 * stream


def test_reentrant_checkpointing_cannot_be_configured() -> None:
    assert POLICIES == ("none", "block", "round")
    with pytest.raises(ModelConfigError, match="recompute: 'reentrant' is unknown; use one of none, block, round"):
        DeepLoopModel(CONFIG, recompute="reentrant")  # type: ignore[arg-type]
