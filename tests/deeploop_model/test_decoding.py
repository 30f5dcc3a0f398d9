"""Cached decoding against full forward passes, the cheaper cache, and early exit against a loop by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel, ModelConfigError
from deeploop_model.early_exit import EarlyExit, divergence
from deeploop_model.kv_cache import KVCache

VOCAB = 37
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_blocks": 2, "num_rounds": 3},
    "one-block": {"num_blocks": 1, "num_rounds": 5, "residual": "pre_ln", "position": "learned"},
    "grouped": {"num_blocks": 3, "num_rounds": 2, "num_kv_heads": 2, "qk_norm": True, "feed_forward": "swiglu"},
    "huginn": {
        "num_blocks": 2, "num_rounds": 3, "num_prelude_blocks": 2, "num_coda_blocks": 1,
        "injection": "concat-linear", "round_embedding": True, "num_kv_heads": 1,
    },
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32) -> DeepLoopModel:
    config = DeepLoopConfig(d_model=32, num_heads=4, vocab_size=VOCAB, context_length=16, **VARIANTS[name])
    model = DeepLoopModel(config, seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # gains and round embeddings that matter, logits of some size
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model.to(dtype).eval().requires_grad_(False)


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    longest = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=5) for row in rows])


@pytest.mark.parametrize("rounds", [1, 3, 6])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_cached_step_gives_the_logits_of_a_full_pass(name: str, rounds: int) -> None:
    """A prompt of 5, then one token at a time, then two at once: float32, 1e-5; the choice of token is the same."""
    model, text = build(name), tokens(16)
    cache = KVCache(model.config, 1, 16, rounds)
    start = 0
    for end in (5, 6, 7, 8, 10, 11, 16):
        logits = model(text[:, start:end], cache=cache).logits
        expected = model(text[:, :end], num_rounds=rounds).logits[:, start:end]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        start = end
    assert expected.std() > 0.1
    visits = model.config.num_prelude_blocks + rounds * model.config.num_blocks + model.config.num_coda_blocks
    assert cache.nbytes == 2 * visits * model.config.kv_heads * model.config.head_dim * (16 + 1) * 4


@pytest.mark.parametrize("name", VARIANTS)
def test_sequences_of_different_lengths_do_not_see_one_another_or_their_padding(name: str) -> None:
    model = build(name, torch.float64)
    texts = [tokens(length, seed=length) for length in (9, 4, 12)]
    alone = [model(text).logits[0] for text in texts]
    cache = KVCache(model.config, 3, 12)
    counts = [5, 2, 8]
    output = model(padded([t[:, :n] for t, n in zip(texts, counts, strict=True)]), cache=cache, new_tokens=counts)
    for row, (count, expected) in enumerate(zip(counts, alone, strict=True)):
        torch.testing.assert_close(output.logits[row, :count], expected[:count], rtol=0, atol=1e-12)
        assert output.rounds[row].tolist() == [model.config.num_rounds] * count + [0] * (8 - count)
    for _ in range(4):
        new = [min(1, text.shape[1] - done) for text, done in zip(texts, counts, strict=True)]
        step = torch.stack([t[0, min(c, t.shape[1] - 1)] for t, c in zip(texts, counts, strict=True)]).unsqueeze(1)
        logits = model(step, cache=cache, new_tokens=new).logits
        for row, (count, added) in enumerate(zip(counts, new, strict=True)):
            if added:
                torch.testing.assert_close(logits[row, 0], alone[row][count], rtol=0, atol=1e-12)
        counts = [count + added for count, added in zip(counts, new, strict=True)]
    assert counts == cache.lengths == [9, 4, 12]


def test_fewer_kept_rounds_cost_less_memory_and_change_logits_of_later_passes_only() -> None:
    model, text = build("huginn", torch.float64), tokens(12)
    full = model(text, num_rounds=6).logits
    errors, sizes = {}, {}
    for kept in (1, 2, 3, 6):
        cache = KVCache(model.config, 1, 12, num_rounds=6, kept_rounds=kept)
        prompt = model(text[:, :6], cache=cache).logits
        torch.testing.assert_close(prompt, full[:, :6], rtol=0, atol=1e-12)
        rest = torch.cat([model(text[:, t : t + 1], cache=cache).logits for t in range(6, 12)], dim=1)
        errors[kept] = float((rest - full[:, 6:]).norm() / full[:, 6:].norm())
        sizes[kept] = cache.nbytes
    assert errors[6] < 1e-12
    assert all(1e-4 < errors[kept] < 1 for kept in (1, 2, 3)), errors
    per_visit = sizes[6] / (2 + 6 * 2 + 1)
    assert sizes == {kept: per_visit * (2 + kept * 2 + 1) for kept in (1, 2, 3, 6)}


@pytest.mark.parametrize("scope", ["token", "sequence"])
@pytest.mark.parametrize("criterion", ["state", "kl"])
@pytest.mark.parametrize("name", ["plain", "huginn"])
def test_threshold_zero_is_the_full_run_and_infinity_like_the_floor(name: str, criterion: Any, scope: Any) -> None:
    model, text = build(name), tokens(12)
    none = model(text, cache=KVCache(model.config, 1, 16, 7))
    zero = model(text, cache=KVCache(model.config, 1, 16, 7), early_exit=EarlyExit(0.0, criterion, scope))
    assert torch.equal(none.logits, zero.logits)
    assert torch.equal(none.rounds, zero.rounds)
    assert set(none.rounds.flatten().tolist()) == {7}
    for floor in (2, 4, 7):
        cache = KVCache(model.config, 1, 16, 7)
        early = model(text, cache=cache, early_exit=EarlyExit(1e9, criterion, scope, floor))
        assert set(early.rounds.flatten().tolist()) == {floor}
        torch.testing.assert_close(early.logits, model(text, num_rounds=floor).logits, rtol=0, atol=1e-5)
    with pytest.raises(ModelConfigError, match="exit floor: 8 is more than the 7 rounds that run"):
        model(text, cache=KVCache(model.config, 1, 16, 7), early_exit=EarlyExit(1.0, criterion, scope, 8))


def exits_by_hand(model: DeepLoopModel, text: torch.Tensor, rounds: int, threshold: float) -> tuple[Any, list[int]]:
    """One token after another: what a stopped token leaves behind are the keys and values of its last round.

    Each token's whole column of (round, block) entries is a list, filled up with its last round's; no cache class.
    """
    ran, logits = [], []
    columns: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = []  # [token][round][block]
    for t in range(text.shape[1]):
        sequence = model.sequence(text[:, : t + 1])
        x = model.enter(text[:, t : t + 1], model.sequence(text[:, t : t + 1]))
        own: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for r in range(rounds):
            before, entries = x, []
            for k, block in enumerate(model.blocks):
                attention: Any = block.attention
                q, key, value = attention.qkv(x)[0, 0].split(attention.qkv_rows)
                heads = attention.head_dim
                q, key, value = (part.view(-1, heads) for part in (q, key, value))
                turn = [torch.complex(sequence.rotary.cos[t, : heads // 2], sequence.rotary.sin[t, : heads // 2])]  # type: ignore[union-attr]
                q, key = (
                    torch.cat([y.real, y.imag], dim=-1)
                    for y in (torch.complex(p[:, : heads // 2], p[:, heads // 2 :]) * turn[0] for p in (q, key))
                )
                entries.append((key, value))
                seen = [column[r][k] for column in columns] + [(key, value)]
                mixed = []
                for h in range(q.shape[0]):
                    share = torch.stack([q[h] @ ks[h] / heads**0.5 for ks, _ in seen]).softmax(0)
                    mixed.append(sum(s * vs[h] for s, (_, vs) in zip(share, seen, strict=True)))
                branch = attention.output(torch.cat(mixed))
                alpha = model.config.rule.alpha
                x = block.attention_norm(alpha * x + branch)  # type: ignore[operator]
                x = block.feed_forward_norm(alpha * x + block.feed_forward(x))  # type: ignore[operator]
            own.append(entries)
            if r >= 1 and float((x - before).norm() / before.norm()) < threshold:
                break
        ran.append(len(own))
        columns.append(own + [own[-1]] * (rounds - len(own)))
        logits.append(model.project(x, sequence)[0, 0])
    return torch.stack(logits), ran


def test_early_exit_per_token_equals_the_loop_by_hand_at_once_and_step_by_step() -> None:
    model, text = build("plain", torch.float64), tokens(10)
    changes = sorted(change for r in range(2, 7) for change in change_of_state(model, text, r))
    threshold = (changes[24] + changes[25]) / 2  # between two, so that rounding decides nothing
    rule = EarlyExit(threshold)
    expected, ran = exits_by_hand(model, text, 6, threshold)
    assert len(set(ran)) > 1, ran
    at_once = model(text, cache=KVCache(model.config, 1, 16, 6), early_exit=rule)
    assert at_once.rounds[0].tolist() == ran
    torch.testing.assert_close(at_once.logits[0], expected, rtol=0, atol=1e-11)
    cache = KVCache(model.config, 1, 16, 6)
    steps = [model(text[:, t : t + 1], cache=cache, early_exit=rule) for t in range(10)]
    assert [int(step.rounds) for step in steps] == ran
    torch.testing.assert_close(torch.cat([step.logits[0] for step in steps]), expected, rtol=0, atol=1e-11)


def change_of_state(model: DeepLoopModel, text: torch.Tensor, rounds: int) -> list[float]:
    sequence = model.sequence(text)
    *_, before, after = model.rounds(model.enter(text, sequence), sequence, rounds)
    return ((after - before).norm(dim=-1) / before.norm(dim=-1))[0].tolist()  # type: ignore[no-any-return]


def test_a_sequence_stops_when_its_last_token_would_and_kl_counts_nats() -> None:
    model, text = build("plain", torch.float64), tokens(10)
    for criterion in ("state", "kl"):
        largest = {}
        for r in range(2, 7):
            if criterion == "state":
                largest[r] = max(change_of_state(model, text, r))
            else:
                p, q = (model(text, num_rounds=n).logits[0].softmax(-1) for n in (r, r - 1))
                largest[r] = max(float((p[t] * (p[t] / q[t]).log()).sum()) for t in range(10))
        threshold = sum(sorted(largest.values())[1:3]) / 2
        expected = next((r for r in range(2, 7) if largest[r] < threshold), 6)
        rule = EarlyExit(threshold, criterion, "sequence")
        output = model(text, cache=KVCache(model.config, 1, 16, 6), early_exit=rule)
        assert output.rounds[0].tolist() == [expected] * 10, (criterion, largest)
        torch.testing.assert_close(output.logits, model(text, num_rounds=expected).logits, rtol=0, atol=1e-11)


def test_predictions_that_no_longer_change_do_not_stop_at_threshold_zero() -> None:
    log_p = torch.randn(1, 500, 400, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    log_q = (log_p + 1e-7).log_softmax(-1)  # the same distribution, rounded otherwise
    assert float((log_p.exp() * (log_p - log_q)).sum(-1).min()) < 0
    assert float(divergence(log_p, log_q).min()) == 0


@pytest.mark.parametrize("criterion", ["state", "kl"])
@pytest.mark.parametrize("name", ["plain", "huginn"])
def test_sequences_exit_alike_alone_and_beside_others_of_other_lengths(name: str, criterion: Any) -> None:
    """Scope sequence: neither the padding nor the tokens of another sequence hold one back or let it go."""
    model = build(name, torch.float64)
    texts = [tokens(length, seed=length) for length in (9, 3, 6)]
    changes = []
    for text in texts:
        shallow, deep = (model(text, num_rounds=r).logits.log_softmax(-1) for r in (3, 4))
        kl = float((deep.exp() * (deep - shallow)).sum(-1).max())
        changes.append(kl if criterion == "kl" else max(change_of_state(model, text, 4)))
    rule = EarlyExit(sorted(changes)[1] * 1.001, criterion, "sequence", floor=4)
    alone = [model(text, cache=KVCache(model.config, 1, 12, 6), early_exit=rule) for text in texts]
    ran = [int(output.rounds[0, 0]) for output in alone]
    assert sorted(ran)[:2] == [4, 4]
    assert sorted(ran)[2] > 4
    cache = KVCache(model.config, 3, 12, 6)
    together = model(padded(texts), cache=cache, new_tokens=[9, 3, 6], early_exit=rule)
    for row, (output, text) in enumerate(zip(alone, texts, strict=True)):
        length = text.shape[1]
        assert together.rounds[row, :length].tolist() == [ran[row]] * length
        torch.testing.assert_close(together.logits[row, :length], output.logits[0], rtol=0, atol=1e-11)


def test_arguments_that_do_not_go_together() -> None:
    model, text = build("plain"), tokens(4)
    for_training: list[dict[str, Any]] = [
        {"targets_BT": text}, {"num_rounds": 2}, {"documents_BT": text}, {"round_loss": "uniform"},
    ]  # fmt: skip
    for arguments in for_training:
        with pytest.raises(ModelConfigError, match="cache: has its own num_rounds, and goes with tokens, new_tokens"):
            model(text, cache=KVCache(model.config, 1, 8), **arguments)
    for_decoding: list[dict[str, Any]] = [{"early_exit": EarlyExit(0.1)}, {"new_tokens": [4]}]
    for arguments in for_decoding:
        with pytest.raises(ModelConfigError, match="new_tokens and early_exit: need a cache"):
            model(text, **arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": -1.0}, "exit threshold: -1.0 must be 0 or more"),
        ({"threshold": 1.0, "criterion": "loss"}, "exit criterion: 'loss' is unknown; use state or kl"),
        ({"threshold": 1.0, "scope": "batch"}, "exit scope: 'batch' is unknown; use token or sequence"),
        ({"threshold": 1.0, "floor": 1}, "exit floor: 1 must be 2 or more"),
    ],
)
def test_early_exits_without_meaning(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        EarlyExit(**fields)


def test_what_a_cache_cannot_hold_is_refused() -> None:
    model = build("plain")
    with pytest.raises(ModelConfigError, match="context_length: 17 tokens are more than the 16 read"):
        KVCache(model.config, 1, 17)
    with pytest.raises(ModelConfigError, match="kept_rounds: 4 must be from 1 to the 3 rounds that run"):
        KVCache(model.config, 1, 16, kept_rounds=4)
    with pytest.raises(ModelConfigError, match="num_rounds: 0 must be 1 or more"):
        KVCache(model.config, 1, 16, 0)
    cache = KVCache(model.config, 1, 8)
    with pytest.raises(ModelConfigError, match="cache: 9 tokens are more than its capacity of 8"):
        model(tokens(9), cache=cache)
    with pytest.raises(ModelConfigError, match="cache: was made for 1 sequences, 2 were given"):
        model(tokens(4).expand(2, -1), cache=cache)
