"""The formulas against PyTorch's own counter, which watches the matrix products of a real pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.flops import forward_flops, recompute_flops, train_flops
from deeploop_model.recompute import POLICIES

SMALL: dict[str, Any] = {"d_model": 16, "num_heads": 4, "vocab_size": 70, "context_length": 12, "num_blocks": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_rounds": 3},
    "grouped-swiglu": {"num_rounds": 2, "num_kv_heads": 2, "feed_forward": "swiglu", "d_ff": 24},
    "prelude-coda-concat": {
        "num_rounds": 2, "num_prelude_blocks": 1, "num_coda_blocks": 2, "injection": "concat-linear",
        "tie_embeddings": False,
    },
    "pre_ln-add": {"num_rounds": 2, "injection": "add", "residual": "pre_ln", "round_embedding": True, "d_ff": 40},
}  # fmt: skip


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_equals_the_counter(fields: dict[str, Any]) -> None:
    """Forward exactly, at the rounds of training and at more; backward: two products for each, and in attention the
    scores once more, which a fused kernel does not keep (2.5 instead of 2)."""
    config = DeepLoopConfig(**{**SMALL, **fields})
    batch, length = 3, 10
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = DeepLoopModel(config)
    for rounds in (config.num_rounds, 5):
        with FlopCounterMode(display=False) as counter:
            model(tokens, num_rounds=rounds)
        assert counter.get_total_flops() == batch * length * forward_flops(config, rounds, length)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).loss.backward()
    by_operation = counter.get_flop_counts()["Global"]
    attention_forward = config.unrolled_depth * 4 * length * config.d_model * batch * length
    again = sum(n for op, n in by_operation.items() if "attention" in str(op) and "backward" in str(op))
    more = again - 2 * attention_forward if again else 0
    assert more in (0, attention_forward // 2)
    assert counter.get_total_flops() - more == batch * length * train_flops(config, length=length)


@pytest.mark.parametrize(
    ("backprop_rounds", "round_loss"), [(2, "last"), (9, "last"), (None, "uniform"), (3, "linear")], ids=str
)
def test_truncated_backpropagation_and_loss_of_every_round(backprop_rounds: int | None, round_loss: Any) -> None:
    config = DeepLoopConfig(**{**SMALL, **VARIANTS["prelude-coda-concat"]})
    tokens = torch.zeros(3, 10, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = DeepLoopModel(config)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, 5, backprop_rounds=backprop_rounds, round_loss=round_loss).loss.backward()
    counted = train_flops(config, 5, 10, backprop_rounds=backprop_rounds, round_loss=round_loss)
    assert counter.get_total_flops() == 3 * 10 * counted


@pytest.mark.parametrize("policy", [*POLICIES, "segment:3"])
@pytest.mark.parametrize(
    ("backprop_rounds", "round_loss"), [(None, "last"), (2, "last"), (None, "uniform"), (3, "linear")], ids=str
)
def test_what_recomputation_does_again(policy: str, backprop_rounds: int | None, round_loss: Any) -> None:
    """But for the last product of a recomputed part without a norm behind it, which PyTorch leaves out."""
    config = DeepLoopConfig(**{**SMALL, **VARIANTS["prelude-coda-concat"]})
    tokens = torch.zeros(3, 10, dtype=torch.int64, device="meta")
    counted = []
    for recompute in ("none", policy):
        with torch.device("meta"):
            model = DeepLoopModel(config, recompute=recompute)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens, 5, backprop_rounds=backprop_rounds, round_loss=round_loss).loss.backward()
        counted.append(counter.get_total_flops())
    again = recompute_flops(config, policy, 5, 10, backprop_rounds=backprop_rounds, round_loss=round_loss)
    assert counted[1] - counted[0] == 3 * 10 * again


def test_defaults_are_those_of_training() -> None:
    config = DeepLoopConfig(**SMALL, num_rounds=4)
    assert forward_flops(config) == forward_flops(config, 4, 12)
    assert train_flops(config) == 3 * forward_flops(config)


def test_gpt2_small_is_near_six_times_its_parameters() -> None:
    """The usual estimate 6 P per token, P without position vectors, plus attention's 12 * L * d * T."""
    config = DeepLoopConfig()
    parameters = 12 * 12 * 768**2 + 768 * 50304
    assert train_flops(config) == 6 * parameters + 12 * 12 * 768 * 1024
