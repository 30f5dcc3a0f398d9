"""Text from a model: prompts to tokens, tokens to text, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data_prep.tokenizer import Tokenizer
from deeploop_model import DeepLoopConfig
from deeploop_model.generation import Generated, Stop, generate
from deeploop_model.sampling import Sampling
from pretrain.engine import Engine
from pretrain.seeding import step_seed


@dataclass(frozen=True)
class Text:
    """One prompt with what follows it."""

    prompt: str
    continuation: str
    num_tokens: int
    ended_by: str


def continue_texts(
    model: Callable[..., Any],
    config: DeepLoopConfig,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    start_id: int | None,
    seed: int,
    stop_texts: Sequence[str] = (),
    **options: Any,
) -> tuple[list[Text], Generated]:
    """Continues every prompt until the end of its document, a stop text, or a limit.

    Each prompt follows `start_id`, the token before every document in training (`Manifest.separator_id`), if any. A
    stop text is left out, with what comes after it. `options` are those of `deeploop_model.generation.generate`.
    """
    start = [] if start_id is None else [start_id]
    generated = generate(
        model,
        config,
        [[*start, *tokenizer.encode(prompt)] for prompt in prompts],
        seeds=[step_seed(seed, 0, index) for index in range(len(prompts))],
        stop=stop_rule(tokenizer, stop_texts),
        **options,
    )
    texts = []
    for prompt, continuation in zip(prompts, generated.continuations, strict=True):
        text = cut_at(tokenizer, continuation.tokens, stop_texts)
        texts.append(Text(prompt, text, len(continuation.tokens), continuation.ended_by))
    return texts, generated


def sample_text(
    engine: Engine,
    config: DeepLoopConfig,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    start_id: int | None,
    seed: int,
    device: torch.device,
) -> str:
    """The prompt and up to `num_tokens` tokens drawn after it at temperature 1, as far as the context reaches.

    Every rank must call it with the same arguments: under ZeRO-3 a forward pass gathers weights from all.
    """
    engine.eval()
    texts, _ = continue_texts(
        engine,
        config,
        tokenizer,
        [prompt],
        start_id=start_id,
        seed=seed,
        max_tokens=num_tokens,
        sampling=Sampling(),
        device=device,
    )
    engine.train()
    return prompt + texts[0].continuation


def stop_rule(tokenizer: Tokenizer, stop_texts: Sequence[str]) -> Stop:
    """Ends a continuation with its document, or once it holds one of the texts."""

    def stop(tokens: list[int]) -> bool:
        if tokens[-1] == tokenizer.eos_id:
            return True
        return bool(stop_texts) and any(text in _decode(tokenizer, tokens) for text in stop_texts)

    return stop


def cut_at(tokenizer: Tokenizer, tokens: list[int], stop_texts: Sequence[str]) -> str:
    """The text of a continuation, up to the first of the stop texts in it."""
    text = _decode(tokenizer, tokens)
    return text[: min((text.index(stop) for stop in stop_texts if stop in text), default=None)]


def _decode(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode([token for token in tokens if token != tokenizer.eos_id])
