"""A forward pass that appends tokens to a key-value cache, with or without early exit.

Shape suffixes: B batch, T time of this pass, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deeploop_model.early_exit import EarlyExit, ExitMonitor
from deeploop_model.errors import ModelConfigError
from deeploop_model.kv_cache import CachePass, KVCache
from deeploop_model.norm import stream_dtype
from deeploop_model.rotary import rotary_table
from deeploop_model.sequence import SequenceContext

if TYPE_CHECKING:
    from deeploop_model.model import DeepLoopModel


def cached_pass(
    model: DeepLoopModel,
    tokens_BT: Tensor,
    cache: KVCache,
    new_tokens: Sequence[int] | None,
    early_exit: EarlyExit | None,
) -> tuple[Tensor, Tensor]:
    """Logits [B, T, vocab_size] of tokens that follow those in the cache, and the rounds [B, T] that each ran.

    Row b appends its first `new_tokens[b]` tokens; the rest of the row is padding, whose logits mean nothing and
    whose rounds are 0. Raises ModelConfigError where the cache has no room, or an exit floor lies above the rounds.
    """
    if early_exit is not None and early_exit.floor > cache.num_rounds:
        raise ModelConfigError(f"exit floor: {early_exit.floor} is more than the {cache.num_rounds} rounds that run")
    cache_pass = cache.begin(tokens_BT, new_tokens)
    sequence = context_of(model, cache_pass)
    e_BTD = model.enter(tokens_BT, sequence, cache_pass.prelude())
    x_BTD, rounds_BT = cached_loop(model, e_BTD, sequence, cache_pass, early_exit)
    return model.project(model.leave(x_BTD, sequence, cache_pass.coda()), sequence), rounds_BT


def context_of(model: DeepLoopModel, cache_pass: CachePass) -> SequenceContext:
    """Positions that go on where the cache ends, and a mask over its columns."""
    config, positions_BT = model.config, cache_pass.positions_BT
    dtype = stream_dtype(model.embedding.weight)
    rotary = rotary_table(positions_BT, config.head_dim, config.rope_base, dtype) if config.position == "rope" else None
    return SequenceContext(positions_BT, rotary, cache_pass.mask_B1TS)


def cached_loop(
    model: DeepLoopModel,
    e_BTD: Tensor,
    sequence: SequenceContext,
    cache_pass: CachePass,
    early_exit: EarlyExit | None,
) -> tuple[Tensor, Tensor]:
    """The stream after the rounds that each token runs, [B, T, D], and their number, [B, T]."""
    num_rounds = cache_pass.cache.num_rounds
    u_RD = model.round_vectors(num_rounds, e_BTD)
    running_BT, x_BTD = cache_pass.real_BT, e_BTD
    rounds_BT = torch.zeros_like(running_BT, dtype=torch.int64)

    def read(x_BTD: Tensor) -> Tensor:
        return model.project(model.leave(x_BTD, sequence, cache_pass.coda()), sequence).to(e_BTD.dtype).log_softmax(-1)

    monitor = None if early_exit is None else ExitMonitor(early_exit, cache_pass.real_BT, read)
    for r in range(num_rounds):
        u_D = None if u_RD is None else u_RD[r]
        next_BTD = model.one_round(x_BTD, e_BTD, u_D, sequence, cache_pass.round(r, running_BT))
        x_BTD = torch.where(running_BT.unsqueeze(-1), next_BTD, x_BTD)
        rounds_BT = rounds_BT + running_BT
        if monitor is not None:
            running_BT = running_BT & ~monitor.stopping(r + 1, x_BTD)
            if not running_BT.any():
                cache_pass.repeat_round(r)
                break
    return x_BTD, rounds_BT
