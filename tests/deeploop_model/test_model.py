"""The forward pass against a plain NumPy model, the untied stack, and the properties that a causal loop must have."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from deeploop_model import DeepLoopConfig, DeepLoopModel, ExponentRule, ModelConfigError
from tests.support.plain_model import plain_logits

SMALL: dict[str, Any] = {"d_model": 16, "num_heads": 2, "vocab_size": 37, "context_length": 12}


def build(dtype: torch.dtype = torch.float64, **fields: Any) -> DeepLoopModel:
    """A small model whose norm weights are not all ones, so that forgetting one shows."""
    model = DeepLoopModel(DeepLoopConfig(**{**SMALL, **fields}), seed=5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.to(dtype)


def tokens(batch: int = 3, length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("residual", ["deeploop", "deepnorm", "post_ln", "pre_ln", ExponentRule(p=0.45)], ids=str)
@pytest.mark.parametrize(("blocks", "rounds", "run"), [(2, 3, 3), (1, 4, 2), (3, 1, 1)])
def test_equals_plain_model(blocks: int, rounds: int, run: int, residual: Any, tie: bool) -> None:
    model = build(num_blocks=blocks, num_rounds=rounds, residual=residual, tie_embeddings=tie)
    batch = tokens(batch=1, length=6)
    expected = plain_logits(model.state_dict(), model.config, batch[0].tolist(), run)
    np.testing.assert_allclose(model(batch, num_rounds=run).logits[0].detach().numpy(), expected, rtol=0, atol=1e-11)


def test_one_round_of_n_blocks_is_a_plain_deepnorm_stack_with_p_one_half() -> None:
    """R = 1 must be neutral: the rule of K = N blocks is DeepNorm's with exponent 1/2."""
    model = build(num_blocks=4, num_rounds=1, residual="deeploop")
    as_exponent = dataclasses.replace(model.config, residual=ExponentRule(p=0.5))
    expected = plain_logits(model.state_dict(), as_exponent, tokens(1, 6)[0].tolist(), 1)
    np.testing.assert_allclose(model(tokens(1, 6)).logits[0].detach().numpy(), expected, rtol=0, atol=1e-11)


def unrolled(model: DeepLoopModel) -> DeepLoopModel:
    """K*R blocks with their own copies of the weights, applied once."""
    config = dataclasses.replace(model.config, num_blocks=model.config.unrolled_depth, num_rounds=1)
    untied = DeepLoopModel(config).to(model.embedding.weight.dtype)
    weights = {name: w for name, w in model.state_dict().items() if not name.startswith("blocks.")}
    for visit in range(config.num_blocks):
        block = model.blocks[visit % model.config.num_blocks]
        weights |= {f"blocks.{visit}.{name}": w for name, w in block.state_dict().items()}
    untied.load_state_dict(weights)
    return untied


@pytest.mark.parametrize("residual", ["deeploop", "pre_ln"])
@pytest.mark.parametrize(("blocks", "rounds"), [(2, 4), (1, 5), (3, 2)])
def test_loop_equals_untied_stack_bit_by_bit(blocks: int, rounds: int, residual: Any) -> None:
    looped = build(num_blocks=blocks, num_rounds=rounds, residual=residual)
    untied = unrolled(looped)
    batch, targets = tokens(seed=1), tokens(seed=2)
    a, b = looped(batch, targets), untied(batch, targets)
    assert torch.equal(looped(batch).logits, untied(batch).logits)
    assert torch.equal(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    copies = dict(untied.named_parameters())
    for name, weight in looped.named_parameters():
        assert weight.grad is not None
        if name.startswith("blocks."):
            _, k, rest = name.split(".", 2)
            grads = [copies[f"blocks.{r * blocks + int(k)}.{rest}"].grad for r in range(rounds)]
        else:
            grads = [copies[name].grad]
        expected = torch.stack([grad for grad in grads if grad is not None]).sum(0)
        torch.testing.assert_close(weight.grad, expected, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("run", [1, 2, 4, 7])
def test_causality(run: int) -> None:
    """Changing token t changes no logit before t, and does change those from t on."""
    model = build(num_blocks=2, num_rounds=4)
    batch = tokens()
    before = model(batch, num_rounds=run).logits
    for t in range(batch.shape[1]):
        changed = batch.clone()
        changed[:, t] = (changed[:, t] + 1) % SMALL["vocab_size"]
        after = model(changed, num_rounds=run).logits
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).flatten(1).any(dim=1).all()


def test_alpha_is_that_of_training_whatever_runs() -> None:
    """A run of 2 rounds with a model trained at 4 differs from a model trained at 2 with the same weights."""
    trained_at_4 = build(num_blocks=2, num_rounds=4)
    trained_at_2 = DeepLoopModel(dataclasses.replace(trained_at_4.config, num_rounds=2)).double()
    trained_at_2.load_state_dict(trained_at_4.state_dict())
    batch = tokens()
    assert torch.equal(trained_at_4(batch).logits, trained_at_4(batch, num_rounds=4).logits)
    assert not torch.allclose(trained_at_4(batch, num_rounds=2).logits, trained_at_2(batch).logits)


def test_padded_vocabulary_is_never_predicted() -> None:
    model = build(num_blocks=1)
    assert model.embedding.num_embeddings == 64
    output = model(tokens(), tokens(seed=3))
    assert output.logits is None
    assert model(tokens()).logits.shape == (3, 9, 37)
    output.loss.backward()
    assert model.embedding.weight.grad is not None
    assert torch.count_nonzero(model.embedding.weight.grad[37:]) == 0
    assert torch.count_nonzero(model.embedding.weight.grad[:37]) > 0


def test_loss_is_mean_cross_entropy_over_kept_targets() -> None:
    model = build(num_blocks=1)
    batch, targets = tokens(), tokens(seed=3)
    targets[0, 2:] = -100
    output = model(batch, targets)
    kept = [(b, t) for b in range(3) for t in range(9) if targets[b, t] != -100]
    log_p = F.log_softmax(model(batch).logits, dim=-1)
    expected = -sum(log_p[b, t, targets[b, t]] for b, t in kept) / len(kept)
    torch.testing.assert_close(output.loss, expected)
    assert model(batch).loss is None


def test_bf16_weights_keep_a_float32_stream() -> None:
    """At N = 128 a branch is 1/512 of the skip: a bf16 stream would lose it, ours must not."""
    model = DeepLoopModel(DeepLoopConfig(**SMALL, num_blocks=2, num_rounds=64))
    low = DeepLoopModel(model.config).to(torch.bfloat16)
    low.load_state_dict(model.state_dict())
    sequence = model.sequence(tokens())
    start, exact_start = low.enter(tokens(), sequence), model.enter(tokens(), sequence)
    moved, exact = low.loop(start, sequence, 64) - start, model.loop(exact_start, sequence, 64) - exact_start
    assert moved.dtype == torch.float32
    assert (moved - exact).norm() < 0.05 * exact.norm()


def test_refuses_more_tokens_than_the_context_and_no_rounds() -> None:
    model = build(num_blocks=1)
    with pytest.raises(ModelConfigError, match="context_length: 13 tokens were given, the model reads 12"):
        model(tokens(length=13))
    with pytest.raises(ModelConfigError, match="num_rounds: 0 must be 1 or more"):
        model(tokens(), num_rounds=0)
