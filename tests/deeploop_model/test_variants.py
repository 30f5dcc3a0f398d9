"""Every variant of the loop against the plain NumPy model, finite differences, and causality."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.recompute import POLICIES
from tests.support.plain_model import plain_logits

SMALL: dict[str, Any] = {"d_model": 16, "num_heads": 4, "num_blocks": 2, "num_rounds": 2, "vocab_size": 37}
LENGTH = 7

# Each structural choice at least twice, under different residual rules and beside different other choices.
VARIANTS: dict[str, dict[str, Any]] = {
    "prelude-coda": {"num_prelude_blocks": 2, "num_coda_blocks": 1},
    "prelude-coda-pre_ln": {"num_prelude_blocks": 1, "num_coda_blocks": 2, "residual": "pre_ln"},
    "add": {"injection": "add", "num_rounds": 3, "num_blocks": 1},
    "add-pre_ln": {"injection": "add", "num_prelude_blocks": 1, "residual": "pre_ln"},
    "concat": {"injection": "concat-linear", "num_prelude_blocks": 1, "num_coda_blocks": 1},
    "concat-pre_ln": {"injection": "concat-linear", "residual": "pre_ln"},
    "universal": {
        "num_blocks": 1, "num_rounds": 3, "round_embedding": True, "position": "learned", "residual": "post_ln",
    },
    "round-embedding-injection": {"round_embedding": True, "injection": "add", "residual": "pre_ln"},
    "no-position-odd-heads": {"position": "none", "d_model": 15, "num_heads": 3, "num_kv_heads": 1},
    "learned-pre_ln": {"position": "learned", "residual": "pre_ln", "tie_embeddings": False},
    "grouped": {"num_kv_heads": 2},
    "multi-query-qk-norm": {"num_kv_heads": 1, "qk_norm": True, "rope_base": 500.0},
    "qk-norm-learned": {"qk_norm": True, "position": "learned", "residual": "deepnorm"},
    "swiglu": {"feed_forward": "swiglu", "d_ff": 20},
    "swiglu-pre_ln": {"feed_forward": "swiglu", "d_ff": 24, "residual": "pre_ln"},
    "all": {
        "num_prelude_blocks": 1, "num_coda_blocks": 1, "injection": "concat-linear", "round_embedding": True,
        "num_kv_heads": 2, "qk_norm": True, "feed_forward": "swiglu", "d_ff": 12, "tie_embeddings": False,
    },
}  # fmt: skip
EACH = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)


def build(fields: dict[str, Any], recompute: str = "none") -> DeepLoopModel:
    """A small float64 model in which no weight is still at its initial one or zero, so that forgetting one shows."""
    model = DeepLoopModel(DeepLoopConfig(**{**SMALL, "context_length": 12, **fields}), seed=5, recompute=recompute)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "round_embedding" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.double()


def tokens(seed: int = 0, batch: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


DOCUMENTS = torch.tensor([[4, 4, 4, 9, 9, 4, 4]])  # an id that comes back is a new document


@EACH
def test_equals_plain_model(fields: dict[str, Any]) -> None:
    """At the rounds of training, at more of them, and with packed documents."""
    model, batch = build(fields), tokens()
    for run in (model.config.num_rounds, model.config.num_rounds + 1):
        expected = plain_logits(model.state_dict(), model.config, batch[0].tolist(), run)
        logits = model(batch, num_rounds=run).logits[0].detach().numpy()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-11)
    expected = plain_logits(model.state_dict(), model.config, batch[0].tolist(), 1, DOCUMENTS[0].tolist())
    logits = model(batch, num_rounds=1, documents_BT=DOCUMENTS).logits[0].detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-11)


@EACH
def test_gradients_equal_finite_differences(fields: dict[str, Any]) -> None:
    """The largest entry of every weight's gradient, and that every weight has one, under each recompute policy."""
    step = 1e-6
    batch, targets = tokens(1), tokens(2)
    gradients: list[dict[str, torch.Tensor]] = []
    for policy in POLICIES:
        model = build(fields, recompute=policy)
        model(batch, targets).loss.backward()
        gradients.append({name: w.grad for name, w in model.named_parameters() if w.grad is not None})
    assert gradients[0].keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], gradient, rtol=1e-11, atol=1e-16, msg=name)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            flat, place = weight.view(-1), int(gradients[0][name].abs().argmax())
            before = float(flat[place])
            flat[place] = before + step
            above = model(batch, targets).loss
            flat[place] = before - step
            below = model(batch, targets).loss
            flat[place] = before
            slope = float((above - below) / (2 * step))
            assert slope == pytest.approx(float(gradients[0][name].view(-1)[place]), rel=1e-6, abs=1e-9), name
            assert slope != 0, name


@EACH
def test_causality(fields: dict[str, Any]) -> None:
    """Changing token t changes no logit before t, and does change those from t on."""
    model = build(fields)
    batch = tokens(3)
    with torch.no_grad():
        before = model(batch).logits
        for t in range(LENGTH):
            changed = batch.clone()
            changed[:, t] = (changed[:, t] + 1) % SMALL["vocab_size"]
            after = model(changed).logits
            assert torch.equal(after[:, :t], before[:, :t])
            assert (after[:, t:] != before[:, t:]).any(dim=-1).all()


@EACH
def test_packed_documents_equal_separate_forward_passes(fields: dict[str, Any]) -> None:
    model = build(fields)
    batch = tokens(4, batch=2, length=10)
    documents = torch.tensor([[0] * 4 + [1] * 1 + [2] * 5, [7] * 10])
    cuts = [[(0, 4), (4, 5), (5, 10)], [(0, 10)]]
    with torch.no_grad():
        packed = model(batch, documents_BT=documents).logits
        for b, ends in enumerate(cuts):
            for start, end in ends:
                alone = model(batch[b : b + 1, start:end]).logits[0]
                torch.testing.assert_close(packed[b, start:end], alone, rtol=0, atol=1e-12)
        assert not torch.allclose(packed[0, 4:], model(batch).logits[0, 4:])


def test_loss_and_gradients_of_packed_documents_are_those_of_separate_passes() -> None:
    fields = {**VARIANTS["all"], "position": "learned"}
    batch, targets = tokens(5, length=10), tokens(6, length=10)
    packed, separate = build(fields, recompute="round"), build(fields)
    packed(batch, targets, documents_BT=torch.tensor([[0] * 4 + [1] * 6])).loss.backward()
    logits = torch.cat([separate(batch[:, a:b]).logits[0] for a, b in ((0, 4), (4, 10))])
    torch.autograd.backward(F.cross_entropy(logits, targets[0]))
    for (name, weight), other in zip(packed.named_parameters(), separate.parameters(), strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-9, atol=1e-13, msg=name)


def test_round_embedding_changes_nothing_at_first() -> None:
    fields: dict[str, Any] = {**SMALL, "context_length": 12}
    with_rounds = DeepLoopModel(DeepLoopConfig(**fields, round_embedding=True), seed=3)
    without = DeepLoopModel(DeepLoopConfig(**fields), seed=3)
    without.load_state_dict({n: w for n, w in with_rounds.state_dict().items() if n != "round_embedding.weight"})
    assert torch.count_nonzero(with_rounds.state_dict()["round_embedding.weight"]) == 0
    assert torch.equal(with_rounds(tokens()).logits, without(tokens()).logits)


@pytest.mark.parametrize("fields", [VARIANTS["all"], VARIANTS["universal"]], ids=["all", "universal"])
def test_bf16_weights_stay_near_float64(fields: dict[str, Any]) -> None:
    """No part mixes precisions in a way that fails or loses the stream."""
    exact = build(fields)
    low = DeepLoopModel(exact.config).to(torch.bfloat16)
    low.load_state_dict(exact.state_dict())
    logits, expected = low(tokens(), documents_BT=DOCUMENTS).logits, exact(tokens(), documents_BT=DOCUMENTS).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.double() - expected).norm() < 0.05 * expected.norm()
