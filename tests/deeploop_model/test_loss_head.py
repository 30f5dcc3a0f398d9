"""The chunked loss against PyTorch's on whole logits: values, gradients, precision, and that no whole logits exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.allocation import allocated
from deeploop_model import DeepLoopConfig, DeepLoopModel, loss_head

TOKENS = torch.randint(0, 37, (3, 9), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, 37, (3, 9), generator=torch.Generator().manual_seed(1))
TARGETS[0, 4:] = -100
TARGETS[2, 0] = -100


def build(**fields: Any) -> DeepLoopModel:
    config = DeepLoopConfig(
        num_blocks=1, num_rounds=2, d_model=16, num_heads=2, vocab_size=37, context_length=12, **fields
    )
    return DeepLoopModel(config, seed=1).double()


@pytest.fixture(params=[1, 5, 1000], ids="{} tokens a chunk".format)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head, "CHUNK_ELEMENTS", 64 * request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("frozen", [(), ("embedding.weight",)], ids=["all learn", "frozen matrix"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_loss_and_gradients_equal_those_of_whole_logits(tie: bool, frozen: tuple[str, ...]) -> None:
    """With targets left out, the z term, and a factor behind the loss as for accumulation."""
    ours, reference = build(tie_embeddings=tie), build(tie_embeddings=tie)
    for model in (ours, reference):
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    output = ours(TOKENS, TARGETS, z_loss=0.01)
    (output.loss / 3).backward()
    logits = reference(TOKENS).logits.flatten(0, 1)
    cross_entropy = F.cross_entropy(logits, TARGETS.flatten())
    z = logits.logsumexp(-1)[TARGETS.flatten() != -100].square().mean()
    torch.testing.assert_close(output.loss, cross_entropy + 0.01 * z)
    torch.testing.assert_close(output.last_loss, cross_entropy.detach())
    assert not output.last_loss.requires_grad
    ((cross_entropy + 0.01 * z) / 3).backward()
    for (name, weight), other in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert (weight.grad is None) == (name in frozen)
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-10, atol=1e-15, msg=name)


def test_whole_logits_never_exist() -> None:
    """At no moment of a step is as much allocated as bf16 logits would take: 4,096 tokens, vocabulary 8,192."""
    config = DeepLoopConfig(num_blocks=1, d_model=16, num_heads=2, vocab_size=8192, context_length=512)
    model = DeepLoopModel(config, recompute="round").bfloat16()
    tokens = torch.zeros(8, 512, dtype=torch.int64)
    whole = tokens.numel() * 8192 * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_head, "CHUNK_ELEMENTS", 8192 * 256)
        assert allocated(lambda: model(tokens, tokens).loss.backward).peak < 0.6 * whole
        kept = allocated(lambda: model(tokens, tokens).loss.backward).kept
    assert kept < 0.1 * whole
    peak_in_one_chunk = allocated(lambda: model(tokens, tokens).loss.backward).peak
    assert peak_in_one_chunk > whole  # what is measured is the chunks' doing


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 0.3])
def test_a_factor_behind_the_loss_is_not_rounded(factor: float) -> None:
    """As accumulation and weights of rounds put it there: bf16 holds 0.3 with an error of 0.3 %, a bias of all."""
    config = DeepLoopConfig(num_blocks=1, d_model=64, num_heads=2, vocab_size=64, context_length=64)
    gradients = []
    for scale in (1.0, factor):
        model = DeepLoopModel(config, seed=2).bfloat16()
        tokens = torch.randint(0, 64, (4, 65), generator=torch.Generator().manual_seed(0))
        (model(tokens[:, :-1], tokens[:, 1:]).loss * scale).backward()
        gradients.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]))
    whole, scaled = gradients
    assert float(scaled @ whole / (whole @ whole)) == pytest.approx(factor, rel=3e-4)


def test_gradient_of_the_matrix_is_summed_over_chunks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 weights, 512 chunks: a sum in bf16 would lose several per cent."""
    config = DeepLoopConfig(
        num_blocks=1, d_model=32, num_heads=2, vocab_size=64, context_length=512, tie_embeddings=False
    )
    model = DeepLoopModel(config, seed=2).bfloat16()
    exact = DeepLoopModel(config, seed=2).bfloat16().double()
    tokens = torch.randint(0, 64, (1, 513), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(loss_head, "CHUNK_ELEMENTS", 64)
    for each in (model, exact):
        each(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    found, expected = model.get_parameter("head.weight").grad, exact.get_parameter("head.weight").grad
    assert found is not None
    assert expected is not None
    assert (found.double() - expected).norm() < 0.005 * expected.norm()
