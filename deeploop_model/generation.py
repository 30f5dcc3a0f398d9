"""Continuing prompts token by token with a key-value cache.

Shape suffixes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from deeploop_model.config import DeepLoopConfig
from deeploop_model.early_exit import EarlyExit
from deeploop_model.errors import ModelConfigError
from deeploop_model.kv_cache import KVCache
from deeploop_model.sampling import Sampling, sample

if TYPE_CHECKING:
    from deeploop_model.model import ModelOutput

Stop = Callable[[list[int]], bool]


@dataclass(frozen=True)
class Continuation:
    """What follows one prompt."""

    tokens: list[int]
    """Generated ids; a token that ended the text is the last of them."""
    ended_by: Literal["stop", "max_tokens", "context"]
    """context: prompt and continuation fill the model's context."""
    rounds: list[int]
    """Rounds that each token ran, those of the prompt first. The last token of all was never an input."""


@dataclass(frozen=True)
class Generated:
    """Continuations in the order of their prompts, and what they took."""

    continuations: list[Continuation]
    cache_bytes: int

    @property
    def mean_rounds(self) -> float:
        """Average number of rounds over all tokens that went through the model."""
        rounds = [r for continuation in self.continuations for r in continuation.rounds]
        return sum(rounds) / len(rounds)


@torch.no_grad()
def generate(
    model: Callable[..., ModelOutput],
    config: DeepLoopConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    stop: Stop = lambda tokens: False,
    num_rounds: int | None = None,
    kept_rounds: int | None = None,
    early_exit: EarlyExit | None = None,
    device: torch.device | None = None,
) -> Generated:
    """Continues every prompt by up to `max_tokens` tokens, all prompts in one batch.

    Args:
        model: a DeepLoopModel, or an engine around one.
        config: of that model.
        prompts: token ids; at least one each, and fewer than the context length.
        sampling: how the next token is chosen.
        seeds: one per prompt. A prompt's continuation depends on its own seed, not on the other prompts.
        stop: called with the tokens generated so far for one prompt; True ends it.
        num_rounds, kept_rounds, early_exit: see `deeploop_model.kv_cache` and `deeploop_model.early_exit`.
        device: of the model.

    Raises ModelConfigError for prompts that are empty or fill the context, and where nothing is to be generated.
    """
    if max_tokens < 1:
        raise ModelConfigError(f"max_tokens: {max_tokens} must be 1 or more")
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) < config.context_length:
            raise ModelConfigError(
                f"prompt {index + 1}: {len(prompt)} tokens; the model continues 1 to {config.context_length - 1}"
            )
    capacity = min(config.context_length, max(map(len, prompts)) + max_tokens)
    cache = KVCache(config, len(prompts), capacity, num_rounds, kept_rounds)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    drafts = [_Draft(list(prompt), [], []) for prompt in prompts]
    while any(draft.ended_by is None for draft in drafts):
        new = [draft.pending if draft.ended_by is None else [] for draft in drafts]
        longest = max(map(len, new))
        tokens_BT = torch.tensor([row + [0] * (longest - len(row)) for row in new], device=device)
        output = model(tokens_BT, cache=cache, new_tokens=[len(row) for row in new], early_exit=early_exit)
        assert output.rounds is not None
        assert output.logits is not None
        last_B = torch.tensor([max(len(row), 1) - 1 for row in new], device=tokens_BT.device)
        logits_BV = output.logits[torch.arange(len(new), device=tokens_BT.device), last_B]
        chosen = sample(logits_BV, sampling, generators).tolist()
        for draft, row, rounds, token in zip(drafts, new, output.rounds.tolist(), chosen, strict=True):
            if draft.ended_by is None:
                draft.advance(rounds[: len(row)], token, stop, max_tokens, config.context_length)
    return Generated(
        [Continuation(draft.tokens, draft.ended_by or "max_tokens", draft.rounds) for draft in drafts], cache.nbytes
    )


@dataclass
class _Draft:
    """One sequence on its way."""

    pending: list[int]
    """Tokens that the cache does not hold yet."""
    tokens: list[int]
    rounds: list[int]
    ended_by: Literal["stop", "max_tokens", "context"] | None = None

    def advance(self, rounds: list[int], token: int, stop: Stop, max_tokens: int, context: int) -> None:
        self.rounds += rounds
        self.tokens.append(token)
        self.pending = [token]
        if stop(self.tokens):
            self.ended_by = "stop"
        elif len(self.tokens) == max_tokens:
            self.ended_by = "max_tokens"
        elif len(self.rounds) == context:
            self.ended_by = "context"
