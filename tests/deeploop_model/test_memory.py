"""The formulas for kept activations against what the allocator hands out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.allocation import Allocated, allocated
from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.memory import Precision, activation_bytes, kv_cache_bytes
from deeploop_model.recompute import POLICIES

BATCH, LENGTH = 2, 64
# Wide enough that vectors (norm statistics, rotary tables) are small beside matrices.
SMALL: dict[str, Any] = {"d_model": 128, "num_heads": 4, "vocab_size": 64, "context_length": LENGTH, "num_blocks": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_rounds": 3},
    "pre_ln": {"num_rounds": 3, "residual": "pre_ln"},
    "swiglu-qk-norm": {"num_rounds": 2, "feed_forward": "swiglu", "qk_norm": True},
    "prelude-coda-concat": {
        "num_rounds": 3, "num_prelude_blocks": 1, "num_coda_blocks": 2, "injection": "concat-linear",
    },
    "add": {"num_rounds": 3, "injection": "add"},
}  # fmt: skip
TOLERANCE = 0.1


def measured_bytes(model: DeepLoopModel, num_rounds: int) -> Allocated:
    """Of a training step, after one that made the gradients."""
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    model(tokens, tokens, num_rounds=1).loss.backward()
    return allocated(lambda: model(tokens, tokens, num_rounds=num_rounds).loss.backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_kept_bytes_within_a_tenth_of_measured(fields: dict[str, Any], policy: str, dtype: torch.dtype) -> None:
    """The whole, and what two more rounds add."""
    config = DeepLoopConfig(**{**SMALL, **fields})
    model = DeepLoopModel(config, recompute=policy).to(dtype)
    precision = Precision(weight=dtype.itemsize, stream=4)
    expected, measured = (
        [BATCH * LENGTH * activation_bytes(config, policy, precision, rounds).kept for rounds in (4, 6)],
        [measured_bytes(model, rounds).kept - model.embedding.weight.numel() * 4 for rounds in (4, 6)],
    )
    assert measured[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert measured[1] - measured[0] == pytest.approx(expected[1] - expected[0], rel=TOLERANCE)


def test_recomputed_part_is_the_largest_of_its_policy() -> None:
    config = DeepLoopConfig(**SMALL, num_rounds=2, num_prelude_blocks=5)
    none, block, round_ = (activation_bytes(config, policy, Precision()) for policy in ("none", "block", "round"))
    assert none.recomputed == 0
    assert round_.recomputed == 5 * block.recomputed  # the prelude outgrows a round of two blocks
    assert round_.kept < block.kept < none.kept
    assert round_.peak == round_.kept + round_.recomputed


def test_kv_cache_has_a_slot_per_visit() -> None:
    config = DeepLoopConfig(**SMALL, num_rounds=3, num_prelude_blocks=1, num_coda_blocks=2, num_kv_heads=2)
    assert kv_cache_bytes(config, 2) == (1 + 2 * 3 + 2) * 2 * (2 * 32) * 2
    assert kv_cache_bytes(config, 4, num_rounds=5) == (1 + 2 * 5 + 2) * 2 * (2 * 32) * 4
