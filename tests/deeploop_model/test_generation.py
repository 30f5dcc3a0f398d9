"""Generated tokens against full forward passes, alone and in a batch, and where a continuation ends."""

from __future__ import annotations

import pytest
import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel, ModelConfigError
from deeploop_model.early_exit import EarlyExit
from deeploop_model.generation import generate
from deeploop_model.sampling import Sampling, sample

CONFIG = DeepLoopConfig(num_blocks=1, num_rounds=3, d_model=16, num_heads=2, vocab_size=23, context_length=12)
MODEL = DeepLoopModel(CONFIG, seed=4).double().eval()
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
GREEDY = Sampling(temperature=0)


def by_full_passes(prompt: list[int], count: int, sampling: Sampling, seed: int, rounds: int) -> list[int]:
    generator, tokens = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(count):
        logits = MODEL(torch.tensor([tokens]), num_rounds=rounds).logits[:, -1]
        tokens.append(int(sample(logits, sampling, [generator])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(2.0, top_k=15, top_p=0.9)], ids=["greedy", "drawn"])
def test_a_batch_gives_each_prompt_the_tokens_of_full_passes_over_it_alone(sampling: Sampling) -> None:
    result = generate(MODEL, CONFIG, PROMPTS, max_tokens=6, sampling=sampling, seeds=[7, 8, 9], num_rounds=5)
    for prompt, seed, continuation in zip(PROMPTS, (7, 8, 9), result.continuations, strict=True):
        assert continuation.tokens == by_full_passes(prompt, 6, sampling, seed, rounds=5)
        assert continuation.ended_by == "max_tokens"
        assert continuation.rounds == [5] * (len(prompt) + 5)
    assert result.mean_rounds == 5
    assert result.cache_bytes == 2 * 5 * 3 * 16 * (5 + 6 + 1) * 8  # rounds, sequences, width, columns, float64


def test_ends() -> None:
    free = generate(MODEL, CONFIG, PROMPTS, max_tokens=100, sampling=GREEDY, seeds=[0, 0, 0])
    assert [c.ended_by for c in free.continuations] == ["context"] * 3
    assert [len(c.tokens) + len(p) for c, p in zip(free.continuations, PROMPTS, strict=True)] == [13, 13, 13]
    third = free.continuations[1].tokens[:3]
    stopped = generate(
        MODEL, CONFIG, PROMPTS, max_tokens=100, sampling=GREEDY, seeds=[0, 0, 0], stop=lambda tokens: tokens == third
    )
    assert [c.ended_by for c in stopped.continuations] == ["context", "stop", "context"]
    assert stopped.continuations[1].tokens == third
    assert stopped.continuations[::2] == free.continuations[::2]


def test_early_exit_is_counted() -> None:
    exits = EarlyExit(1e9, floor=2)
    result = generate(MODEL, CONFIG, PROMPTS, max_tokens=3, sampling=GREEDY, seeds=[0, 0, 0], early_exit=exits)
    assert result.mean_rounds == 2


def test_what_cannot_be_continued_is_refused() -> None:
    for prompt in ([], [1] * 12):
        with pytest.raises(ModelConfigError, match=f"prompt 2: {len(prompt)} tokens; the model continues 1 to 11"):
            generate(MODEL, CONFIG, [[1], prompt], max_tokens=3, sampling=GREEDY, seeds=[0, 0])
    with pytest.raises(ModelConfigError, match="max_tokens: 0 must be 1 or more"):
        generate(MODEL, CONFIG, [[1]], max_tokens=0, sampling=GREEDY, seeds=[0])
