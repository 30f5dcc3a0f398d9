"""Predicted peaks against what the allocator hands out, and the policy that is chosen from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.allocation import allocated
from deeploop_model import DeepLoopConfig, DeepLoopModel, ModelConfigError
from deeploop_model.memory import Precision, step_bytes
from deeploop_model.recompute import POLICIES
from deeploop_model.recompute_choice import choose_recompute

PRECISION = Precision()
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "wide": (2, {"d_model": 192, "num_heads": 6, "num_blocks": 3, "num_rounds": 8, "vocab_size": 64}),
    "huginn": (
        4,
        {
            "d_model": 128, "num_heads": 4, "num_rounds": 6, "num_blocks": 2, "vocab_size": 512, "num_coda_blocks": 1,
            "num_prelude_blocks": 1, "feed_forward": "swiglu", "injection": "concat-linear",
        },
    ),
    "many chunks of logits": (
        16,
        {"d_model": 64, "num_heads": 2, "num_blocks": 1, "num_rounds": 4, "vocab_size": 40000},
    ),
    "large vocabulary": (
        8,
        {"d_model": 64, "num_heads": 2, "num_blocks": 2, "num_rounds": 8, "vocab_size": 4096, "residual": "pre_ln"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_predicted_peaks_are_within_a_tenth_of_measured_ones(name: str) -> None:
    sequences, fields = MODELS[name]
    config = DeepLoopConfig(**fields, context_length=128)
    tokens = torch.zeros(sequences, 128, dtype=torch.int64)
    for policy in (*POLICIES, "segment:4"):
        model = DeepLoopModel(config, recompute=policy).bfloat16()
        model(tokens, tokens, num_rounds=1).loss.backward()
        peak = allocated(lambda model=model: model(tokens, tokens).loss.backward).peak  # type: ignore[misc]
        assert step_bytes(config, policy, tokens.numel(), PRECISION) == pytest.approx(peak, rel=0.1), policy


def test_cheapest_that_fits_is_chosen_and_explained() -> None:
    config = DeepLoopConfig(num_blocks=4, num_rounds=16, d_model=256, num_heads=4, vocab_size=512, context_length=512)
    sizes = {policy: step_bytes(config, policy, 4096, PRECISION) for policy in ("none", "selective", "round", "nested")}
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())
    for policy, size in sizes.items():
        choice = choose_recompute(config, 4096, size, PRECISION)
        if policy in ("none", "selective", "nested"):
            assert choice.policy == policy
        assert choice.predicted_bytes <= size
        assert f"recompute: {choice.policy}, the cheapest that fits" in choice.reason
    middle = choose_recompute(config, 4096, sizes["round"], PRECISION)
    assert middle.policy in ("round", "block") or middle.policy.startswith("segment:")
    with pytest.raises(ModelConfigError, match=r"nothing fits 10 MiB: nested takes .* take fewer sequences at once"):
        choose_recompute(config, 4096, 10 * 2**20, PRECISION)
