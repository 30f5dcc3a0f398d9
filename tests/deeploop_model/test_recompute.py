"""Recomputation changes memory and work, never a result."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deeploop_model import DeepLoopConfig, DeepLoopModel, ModelConfigError
from deeploop_model.recompute import OFFLOAD, POLICIES, Recompute
from tests.support.allocation import Allocated, allocated

CONFIG = DeepLoopConfig(num_blocks=2, num_rounds=4, d_model=16, num_heads=2, vocab_size=37, context_length=12)
HUGINN: dict[str, Any] = {
    "num_prelude_blocks": 1, "num_coda_blocks": 1, "injection": "concat-linear", "round_embedding": True,
    "feed_forward": "swiglu", "residual": "pre_ln",
}  # fmt: skip
BATCH = torch.randint(0, 37, (3, 13), generator=torch.Generator().manual_seed(0))
OTHERS = [*POLICIES[1:], "segment:3", "segment:9", *(policy + OFFLOAD for policy in POLICIES)]


def trained(policy: str, dtype: torch.dtype, round_loss: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loss and gradients of one pass through 5 rounds."""
    config = DeepLoopConfig(
        num_blocks=2, num_rounds=5, d_model=16, num_heads=2, vocab_size=37, context_length=12, **fields
    )
    model = DeepLoopModel(config, seed=1, recompute=policy).to(dtype)
    loss = model(BATCH[:, :-1], BATCH[:, 1:], round_loss=round_loss).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss, **gradients}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_loss_and_gradients_equal_those_without_recomputation_bit_by_bit(dtype: torch.dtype) -> None:
    plain = trained("none", dtype, "last", {})
    for policy in OTHERS:
        found = trained(policy, dtype, "last", {})
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain), policy


def test_where_gradients_of_a_state_are_added_in_another_order_they_are_the_same_but_for_that() -> None:
    """With injection, or all rounds read out: the loss is the same bit by bit, gradients are to float64."""
    plain = trained("none", torch.float64, "linear", HUGINN)
    for policy in OTHERS:
        found = trained(policy, torch.float64, "linear", HUGINN)
        assert torch.equal(found["loss"], plain["loss"])
        for name in plain:
            torch.testing.assert_close(found[name], plain[name], rtol=1e-10, atol=1e-15, msg=f"{policy} {name}")
    low = trained("none", torch.bfloat16, "linear", HUGINN)["loss"]
    assert all(torch.equal(trained(policy, torch.bfloat16, "linear", HUGINN)["loss"], low) for policy in OTHERS)


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().partition(".")[0].removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "again"),
    [("none", 0), ("selective", 0), ("block", 1), ("round", 1), ("segment:2", 1), ("segment:3", 1), ("nested", 2)],
)
def test_work_that_is_done_again(policy: str, again: int) -> None:
    """In visits' forward passes, whose attention is counted, and for `selective` by the matrix products."""
    model = DeepLoopModel(CONFIG, seed=1, recompute=policy).bfloat16()
    loss = model(BATCH[:, :-1], BATCH[:, 1:]).loss
    with Counted() as backward:
        loss.backward()
    visits = 4 * 2
    # A recomputed part ends where nothing more is kept: nested rounds end before their last block.
    attention = visits * again - (4 if policy == "nested" else 0)
    assert backward.calls["_scaled_dot_product_flash_attention_for_cpu"] == attention
    # Two products of the backward pass for each of the forward pass, four a visit. The loss has had its own.
    products = backward.calls["mm"] - 2 * 4 * visits
    assert 3 * attention <= products <= 4 * attention
    if policy == "selective":
        assert backward.calls["gelu"] == visits


def step_memory(policy: str, num_rounds: int) -> Allocated:
    config = DeepLoopConfig(num_blocks=2, num_rounds=8, d_model=64, num_heads=2, vocab_size=37, context_length=64)
    model = DeepLoopModel(config, recompute=policy).bfloat16()
    tokens = torch.randint(0, 37, (4, 65), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    return allocated(lambda: model(tokens[:, :-1], tokens[:, 1:], num_rounds=num_rounds).loss.backward)


STATE = 4 * 64 * 64 * 2
"""Bytes of one hidden state in 16 bits."""


@pytest.mark.parametrize("policy", ["round", "nested"])
def test_a_round_costs_one_state_of_16_bits(policy: str) -> None:
    """B*T*d*2 bytes more between the passes, and at the peak, per round."""
    few, many = step_memory(policy, 8), step_memory(policy, 24)
    assert (many.kept - few.kept) / 16 <= 1.05 * STATE
    assert (many.peak - few.peak) / 16 <= 1.05 * STATE
    assert (many.kept - few.kept) / 16 > 0.99 * STATE


def test_other_policies_cost_what_their_table_says() -> None:
    growth = {policy: (step_memory(policy, 16).kept - step_memory(policy, 8).kept) / 8 for policy in POLICIES}
    assert growth["segment:2"] <= 1.05 * 2 * STATE  # twice float32 every other round
    assert growth["block"] <= 1.05 * 2 * 2 * STATE  # float32 before each of two blocks
    assert growth["round"] < growth["block"] < growth["selective"] < 0.8 * growth["none"]
    assert step_memory("nested", 8).peak < step_memory("round", 8).peak < step_memory("block", 24).peak


def test_offloaded_states_are_copies_on_the_host() -> None:
    """What is kept is a copy, so that the device's own tensors are free: between the passes nothing else is alive."""
    model = DeepLoopModel(CONFIG, recompute="none" + OFFLOAD).bfloat16()
    devices: list[torch.device] = []
    original = torch.Tensor.copy_

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        devices.append(target.device)
        return original(target, source, non_blocking)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_)
        loss = model(BATCH[:, :-1], BATCH[:, 1:]).loss
    assert len(devices) > 4 * 2 * 10
    before = copy.deepcopy(model.state_dict())
    loss.backward()
    assert all(torch.equal(before[name], w) for name, w in model.state_dict().items())


def test_texts_of_policies() -> None:
    assert Recompute.parse("segment:3+offload") == Recompute("segment", 3, offload=True)
    assert Recompute.parse("none") == Recompute("none")
    for text in ("reentrant", "segment", "segment:", "segment:0", "segment:x", "round:2", "round+", "+offload", ""):
        with pytest.raises(ModelConfigError, match=r"is unknown; use one of none, selective, block, round, segment:N,"):
            DeepLoopModel(CONFIG, recompute=text)
