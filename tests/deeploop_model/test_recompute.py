"""Recomputation changes memory and work, never a result."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from benchmarks.allocation import Allocated, allocated
from deeploop_model import DeepLoopConfig, DeepLoopModel, ModelConfigError, recompute, round_states
from deeploop_model.memory import Precision, activation_bytes
from deeploop_model.recompute import OFFLOAD, POLICIES, Recompute, to_host

CONFIG = DeepLoopConfig(num_blocks=2, num_rounds=4, d_model=16, num_heads=2, vocab_size=37, context_length=12)
HUGINN: dict[str, Any] = {
    "num_prelude_blocks": 1, "num_coda_blocks": 1, "injection": "concat-linear", "round_embedding": True,
    "feed_forward": "swiglu", "residual": "pre_ln",
}  # fmt: skip
BATCH = torch.randint(0, 37, (3, 13), generator=torch.Generator().manual_seed(0))
OTHERS = [
    *POLICIES[1:], "segment:3", "segment:9", *(policy + OFFLOAD for policy in POLICIES if policy != "selective"),
]  # fmt: skip


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


def test_a_graph_may_be_gone_through_twice_where_recomputation_runs_to_its_end() -> None:
    """The last group of segments has one round, whose state is that after the others."""
    found = []
    for policy in ("none", "segment:2"):
        model = DeepLoopModel(dataclasses.replace(CONFIG, num_rounds=5), seed=1, recompute=policy).bfloat16()
        with set_checkpoint_early_stop(False):
            loss = model(BATCH[:, :-1], BATCH[:, 1:]).loss
            for retain in (True, False):
                model.zero_grad()
                loss.backward(retain_graph=retain)
        found.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


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


@pytest.mark.parametrize("policy", [policy for policy in (*POLICIES, "segment:3") if policy != "selective"])
def test_offloading_moves_what_the_policy_keeps(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that go to the host in the forward pass, against those that the policy keeps."""
    config = DeepLoopConfig(num_blocks=2, num_rounds=6, d_model=64, num_heads=2, vocab_size=37, context_length=64)
    model = DeepLoopModel(config, recompute=policy + OFFLOAD).bfloat16()
    tokens = torch.randint(0, 37, (4, 65), generator=torch.Generator().manual_seed(0))
    moved: list[int] = []

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.nbytes)
        return to_host(tensor)

    for module in (recompute, round_states):
        monkeypatch.setattr(module, "to_host", noting)
    model(tokens[:, :-1], tokens[:, 1:])
    kept = 4 * 64 * activation_bytes(config, policy, Precision()).kept
    # The state that a round starts from last stays on the device, and the loss is outside.
    assert kept - 4 * 64 * 64 * 8 <= sum(moved) <= 1.1 * kept


def test_texts_of_policies() -> None:
    assert Recompute.parse("segment:3+offload") == Recompute("segment", 3, offload=True)
    assert Recompute.parse("none") == Recompute("none")
    with pytest.raises(ModelConfigError, match=r"selective\+offload'.* use block"):
        Recompute.parse("selective+offload")
    for text in ("reentrant", "segment", "segment:", "segment:0", "segment:x", "round:2", "round+", "+offload", ""):
        with pytest.raises(ModelConfigError, match=r"is unknown; use one of none, selective, block, round, segment:N,"):
            DeepLoopModel(CONFIG, recompute=text)
