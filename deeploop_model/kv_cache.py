"""Keys and values of earlier tokens: one slot per block visit, in the order prelude, (round, block), coda.

A token's key depends on the stream that the visit read, so no two visits may share a slot: the loop has K*R of them.
Within a slot every sequence has columns 0, 1, 2, ... for its own tokens, whatever the others hold; a key's column is
its position. So prompts of different lengths need no padding on the left, and a query at position p sees columns
0..p of its row.

With `kept_rounds` = c < R only c slots per block exist, and round r uses slot r mod c, over what round r - c left
there. Within one forward pass that changes nothing, since each round attends to what it has just written; tokens of
earlier passes are seen at the last of their rounds that used the slot (the cache sharing of Geiping et al. 2025,
arXiv:2502.05171). Memory of the loop shrinks to c/R; logits change.

Shape suffixes: B batch, T time of this pass, S columns, G key-value heads, C head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deeploop_model.config import DeepLoopConfig
from deeploop_model.errors import ModelConfigError


class KVCache:
    """Keys and values of a batch of sequences under generation.

    Args:
        config: of the model.
        batch_size: sequences.
        capacity: tokens that a sequence can grow to; at most the context length.
        num_rounds: R of every pass with this cache; the config's by default.
        kept_rounds: c, how many rounds have slots of their own; all by default.

    Tensors are made at the first pass, in its precision and on its device. Raises ModelConfigError.
    """

    def __init__(
        self,
        config: DeepLoopConfig,
        batch_size: int,
        capacity: int,
        num_rounds: int | None = None,
        kept_rounds: int | None = None,
    ) -> None:
        self.num_rounds = config.num_rounds if num_rounds is None else num_rounds
        self.kept_rounds = self.num_rounds if kept_rounds is None else kept_rounds
        if self.num_rounds < 1:
            raise ModelConfigError(f"num_rounds: {num_rounds} must be 1 or more")
        if not 1 <= self.kept_rounds <= self.num_rounds:
            raise ModelConfigError(
                f"kept_rounds: {kept_rounds} must be from 1 to the {self.num_rounds} rounds that run"
            )
        self.context_length = config.context_length
        self.capacity = self._checked(capacity)
        self.lengths = [0] * batch_size
        self.num_blocks = config.num_blocks
        self.first_loop_slot = config.num_prelude_blocks
        self.first_coda_slot = self.first_loop_slot + self.kept_rounds * config.num_blocks
        self.num_slots = self.first_coda_slot + config.num_coda_blocks
        self._keys: list[Tensor | None] = [None] * self.num_slots
        self._values: list[Tensor | None] = [None] * self.num_slots

    @property
    def nbytes(self) -> int:
        """Memory in bytes that the cache holds."""
        return sum(store.nbytes for store in (*self._keys, *self._values) if store is not None)

    def reserve(self, capacity: int) -> None:
        """Lets sequences grow to more tokens than before; what is stored is copied. Raises ModelConfigError."""
        self._checked(capacity)
        for stores in (self._keys, self._values):
            for slot, store in enumerate(stores):
                if store is not None:
                    batch_size, heads, _, width = store.shape
                    larger = stores[slot] = store.new_zeros(batch_size, heads, capacity + 1, width)
                    larger[:, :, : self.capacity] = store[:, :, : self.capacity]
        self.capacity = capacity

    def select(self, rows_B: Tensor) -> None:
        """Sequence b becomes a copy of sequence `rows_B[b]`, as beam search needs it."""
        self.lengths = [self.lengths[row] for row in rows_B.tolist()]
        for stores in (self._keys, self._values):
            stores[:] = [None if store is None else store.index_select(0, rows_B.to(store.device)) for store in stores]

    def _checked(self, capacity: int) -> int:
        if capacity > self.context_length:
            raise ModelConfigError(f"context_length: {capacity} tokens are more than the {self.context_length} read")
        return capacity

    def begin(self, tokens_BT: Tensor, new_tokens: Sequence[int] | None) -> CachePass:
        """Room for the next tokens of each sequence: row b appends its first `new_tokens[b]`, all T by default.

        Raises ModelConfigError where a sequence would outgrow the capacity.
        """
        batch_size, length = tokens_BT.shape
        new = [length] * batch_size if new_tokens is None else list(new_tokens)
        if batch_size != len(self.lengths) or len(new) != batch_size:
            raise ModelConfigError(f"cache: was made for {len(self.lengths)} sequences, {batch_size} were given")
        grown = [old + added for old, added in zip(self.lengths, new, strict=True)]
        if max(grown) > self.capacity:
            raise ModelConfigError(f"cache: {max(grown)} tokens are more than its capacity of {self.capacity}")
        device = tokens_BT.device
        steps_T = torch.arange(length, device=device)
        positions_BT = torch.tensor(self.lengths, device=device).unsqueeze(-1) + steps_T
        real_BT = steps_T < torch.tensor(new, device=device).unsqueeze(-1)
        self.lengths = grown
        columns_BT = torch.where(real_BT, positions_BT, self.capacity)
        positions_BT = positions_BT.clamp(max=self.capacity - 1)
        mask_BTS = torch.arange(max(grown), device=device) <= positions_BT.unsqueeze(-1)
        return CachePass(self, positions_BT, real_BT, columns_BT, mask_BTS.unsqueeze(1))

    def slot_of(self, round_: int, block: int) -> int:
        """Index of the slot of a visit of the loop; rounds and blocks count from 0."""
        return self.first_loop_slot + (round_ % self.kept_rounds) * self.num_blocks + block

    def write(self, slot: int, columns_BT: Tensor, k_BGTC: Tensor, v_BGTC: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values; returns the whole stores, [B, G, capacity + 1, C] each."""
        return self._write(self._keys, slot, columns_BT, k_BGTC), self._write(self._values, slot, columns_BT, v_BGTC)

    def read(self, slot: int, columns_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, T, C] of some columns of a slot that has been written."""
        keys, values = self._keys[slot], self._values[slot]
        assert keys is not None
        assert values is not None
        index_BGTC = columns_BT[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        return keys.gather(2, index_BGTC), values.gather(2, index_BGTC)

    def _write(self, stores: list[Tensor | None], slot: int, columns_BT: Tensor, x_BGTC: Tensor) -> Tensor:
        store = stores[slot]
        if store is None:
            batch_size, heads, _, width = x_BGTC.shape
            # Zeros, not garbage: a NaN in a masked column would still spread through 0 * NaN.
            store = stores[slot] = x_BGTC.new_zeros(batch_size, heads, self.capacity + 1, width)
        return store.scatter_(2, columns_BT[:, None, :, None].expand_as(x_BGTC), x_BGTC)


@dataclass(frozen=True)
class CachePass:
    """One forward pass that appends tokens to a cache."""

    cache: KVCache
    positions_BT: Tensor
    """Of each token in its sequence; padding has some position that exists."""
    real_BT: Tensor
    """False for padding."""
    columns_BT: Tensor
    """Where keys go: the position, and for padding one column past the last that any query sees."""
    mask_B1TS: Tensor
    """True where a query may attend to a column in use."""

    def prelude(self) -> list[CacheSlot]:
        return [CacheSlot(self, slot) for slot in range(self.cache.first_loop_slot)]

    def coda(self) -> list[CacheSlot]:
        return [CacheSlot(self, slot) for slot in range(self.cache.first_coda_slot, self.cache.num_slots)]

    def round(self, round_: int, running_BT: Tensor) -> list[CacheSlot]:
        """The slots of one round, one per block; tokens that no longer run keep those of the round before."""
        cache = self.cache
        return [
            CacheSlot(
                self,
                cache.slot_of(round_, block),
                None if round_ == 0 else (cache.slot_of(round_ - 1, block), running_BT),
            )
            for block in range(cache.num_blocks)
        ]

    def repeat_round(self, last: int) -> None:
        """Hands the keys and values of round `last`, in which all tokens stopped, to the rounds that would follow."""
        cache = self.cache
        for round_ in range(last + 1, min(cache.num_rounds, last + cache.kept_rounds)):
            for block in range(cache.num_blocks):
                k_BGTC, v_BGTC = cache.read(cache.slot_of(round_ - 1, block), self.columns_BT)
                cache.write(cache.slot_of(round_, block), self.columns_BT, k_BGTC, v_BGTC)


@dataclass(frozen=True)
class CacheSlot:
    """Where one visit of one pass keeps keys and values."""

    cache_pass: CachePass
    index: int
    inherited: tuple[int, Tensor] | None = None
    """(slot of the round before, running [B, T]): a token that does not run takes over what stands there."""

    def extended(self, k_BGTC: Tensor, v_BGTC: Tensor) -> tuple[Tensor, Tensor]:
        """Stores this pass's keys and values; returns those of all columns in use, [B, G, S, C]."""
        cache, columns_BT = self.cache_pass.cache, self.cache_pass.columns_BT
        if self.inherited is not None:
            source, running_BT = self.inherited
            old_k_BGTC, old_v_BGTC = cache.read(source, columns_BT)
            running_B1T1 = running_BT[:, None, :, None]
            k_BGTC = torch.where(running_B1T1, k_BGTC, old_k_BGTC)
            v_BGTC = torch.where(running_B1T1, v_BGTC, old_v_BGTC)
        keys, values = cache.write(self.index, columns_BT, k_BGTC, v_BGTC)
        count = self.cache_pass.mask_B1TS.shape[-1]
        return keys[:, :, :count], values[:, :, :count]
