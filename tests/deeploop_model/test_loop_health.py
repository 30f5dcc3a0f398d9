"""Loop health against the plain model: NumPy, float64, one token, head and pair after the other."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from deeploop_model import DeepLoopConfig, DeepLoopModel, ModelConfigError, loop_health
from deeploop_model.compilation import compiled_block
from deeploop_model.loop_health import LoopHealth, LoopSums, health_of
from tests.support.plain_model import Array, Seen, plain_logits

ROUNDS, VOCAB, LENGTH = 3, 37, 9
TOKENS = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.tensor([[0] * LENGTH, [0, 0, 0, 0, 1, 1, 2, 2, 2]])
FORMS: dict[str, dict[str, Any]] = {
    "deeploop": {},
    "pre_ln_learned_positions": {"residual": "pre_ln", "position": "learned"},
    "prelude_coda_injection": {
        "num_prelude_blocks": 1, "num_coda_blocks": 1, "injection": "concat-linear", "round_embedding": True,
    },
    "grouped_queries_qk_norm": {"num_kv_heads": 1, "qk_norm": True, "feed_forward": "swiglu"},
    "own_head": {"tie_embeddings": False, "residual": "deepnorm"},
}  # fmt: skip


def model_of(fields: dict[str, Any]) -> DeepLoopModel:
    """Weights far from their start, so that no quantity is near a limit."""
    config = DeepLoopConfig(
        num_blocks=2, num_rounds=ROUNDS, d_model=16, num_heads=4, vocab_size=VOCAB, context_length=12, **fields
    )
    model = DeepLoopModel(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    return model


def measured(model: DeepLoopModel, documents: torch.Tensor | None) -> LoopSums:
    sums = model(TOKENS[:, :-1], TOKENS[:, 1:], ROUNDS, documents, observed=True).loop
    assert isinstance(sums, LoopSums)
    return sums


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def brute_force(model: DeepLoopModel, documents: torch.Tensor | None) -> LoopHealth:
    """Every quantity from its definition, one sequence at a time."""
    config, weights, num_blocks = model.config, model.state_dict(), model.config.num_blocks
    per_block: dict[str, list[list[list[float]]]] = {
        name: [[[] for _ in range(num_blocks)] for _ in range(ROUNDS)] for name in loop_health.PER_BLOCK
    }
    per_round: dict[str, list[list[float]]] = {name: [[] for _ in range(ROUNDS)] for name in loop_health.PER_ROUND}
    for row, tokens in enumerate(TOKENS.tolist()):
        inside = None if documents is None else documents[row].tolist()
        log_p: list[Array] = []
        for r in range(ROUNDS):
            log_p.append(log_softmax(plain_logits(weights, config, tokens[:-1], r + 1, inside)))
            per_round["loss"][r] += [-float(log_p[r][t, tokens[t + 1]]) for t in range(LENGTH)]
            if r > 0:
                per_round["prediction_kl"][r] += [
                    float((np.exp(now) * (now - before)).sum())
                    for now, before in zip(log_p[r], log_p[r - 1], strict=True)
                ]
        seen = Seen()
        plain_logits(weights, config, tokens[:-1], ROUNDS, inside, seen)
        for r in range(ROUNDS):
            for k in range(num_blocks):
                for t in range(LENGTH):
                    x = seen.streams[r * num_blocks + k][t]
                    per_block["state_norm"][r][k].append(float(x @ x) / len(x))
                    if r > 0:
                        y = seen.streams[(r - 1) * num_blocks + k][t]
                        size = math.sqrt(y @ y)
                        per_block["state_change"][r][k].append(math.sqrt((x - y) @ (x - y)) / size)
                        per_block["state_cosine"][r][k].append(float(x @ y) / size / math.sqrt(x @ x))
                    for scores in seen.scores[r * num_blocks + k][t]:
                        per_block["attention_logit"][r][k].append(float(scores.max()))
                        p = np.exp(scores - scores.max())
                        p /= p.sum()
                        if len(scores) > 1:
                            per_block["attention_entropy"][r][k].append(float(-(p * np.log(p)).sum()))

    def means(values: list[list[float]]) -> list[float]:
        return [float(np.mean(v)) if v else math.nan for v in values]

    blocks = {name: [means(of_round) for of_round in rounds] for name, rounds in per_block.items()}
    blocks["state_norm"] = [[math.sqrt(v) for v in of_round] for of_round in blocks["state_norm"]]
    blocks["attention_logit"] = [[max(v) for v in of_round] for of_round in per_block["attention_logit"]]
    return LoopHealth(blocks, {name: means(rounds) for name, rounds in per_round.items()})


def assert_equal(found: LoopHealth, expected: LoopHealth, rel: float) -> None:
    for name in loop_health.PER_BLOCK:
        for one, two in zip(found.per_block[name], expected.per_block[name], strict=True):
            assert one == pytest.approx(two, rel=rel, nan_ok=True), name
    for name in loop_health.PER_ROUND:
        assert found.per_round[name] == pytest.approx(expected.per_round[name], rel=rel, nan_ok=True), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("documents", "chunk"), [(None, loop_health.CHUNK_ELEMENTS), (DOCUMENTS, 200)], ids=["whole", "packed_chunked"]
)
def test_equals_brute_force_in_float64(form: str, documents: torch.Tensor | None, chunk: int) -> None:
    """Chunks of 200 elements are of 5 tokens of logits (a vocabulary of 37, padded) and 2 rows of attention scores."""
    model = model_of(FORMS[form]).double()
    with patch.object(loop_health, "CHUNK_ELEMENTS", chunk):
        found = health_of(measured(model, documents))
    assert_equal(found, brute_force(model, documents), rel=1e-9)
    assert math.isnan(found.per_block["state_change"][0][0])
    assert found.per_round["prediction_kl"][1] > 1e-3


def test_bf16_is_near_and_changes_nothing() -> None:
    """Weights of both models are the same bf16 numbers; the pass leaves no trace in the next one."""
    model = model_of({"num_kv_heads": 2}).bfloat16()
    before = model(TOKENS[:, :-1], TOKENS[:, 1:]).loss
    found = health_of(measured(model, DOCUMENTS))
    assert torch.equal(model(TOKENS[:, :-1], TOKENS[:, 1:]).loss, before)
    assert not any(weight.grad is not None for weight in model.parameters())
    assert_equal(found, brute_force(model.double(), DOCUMENTS), rel=0.08)


def test_sums_of_parts_are_those_of_the_whole() -> None:
    """As over ranks: sums add up, the largest logit is the larger one. Targets of -100 count for no loss."""
    model = model_of({}).double()
    targets = TOKENS[:, 1:].masked_fill(torch.arange(LENGTH) < 2, -100)
    whole, *parts = (
        model(TOKENS[rows, :-1], targets[rows], observed=True).loop for rows in (slice(0, 2), slice(0, 1), slice(1, 2))
    )
    one, two = parts
    added = LoopSums(
        one.counts + two.counts,
        one.states_QRK + two.states_QRK,
        one.read_outs_QR + two.read_outs_QR,
        torch.maximum(one.largest_logit_RK, two.largest_logit_RK),
    )
    assert whole.counts.tolist() == [2 * LENGTH, 2 * (LENGTH - 2), 2 * 4 * (LENGTH - 1)]
    for expected, found in zip(whole, added, strict=True):
        torch.testing.assert_close(found, expected)
    last = model(TOKENS[:, :-1], targets).last_loss
    assert health_of(whole).per_round["loss"][-1] == pytest.approx(float(last), rel=1e-12)


def test_compiled_block_is_measured_as_the_plain_one() -> None:
    """Without the compiler's back end, which turns no code around: what is traced must be the same block."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = model_of({"num_kv_heads": 2})
    expected = health_of(measured(model, DOCUMENTS))
    model.block_step = compiled_block(counter)
    found = health_of(measured(model, DOCUMENTS))
    assert_equal(found, expected, rel=1e-5)
    assert counter.frame_count == 1  # watching a pass compiles nothing more than the pass itself
    with torch.no_grad():
        model(TOKENS[:, :-1], TOKENS[:, 1:], documents_BT=DOCUMENTS)
    assert counter.frame_count == 1


def test_needs_targets() -> None:
    with pytest.raises(ModelConfigError, match="observed: needs targets"):
        model_of({})(TOKENS, observed=True)
