"""The order in which samples are consumed: a keyed permutation per epoch, computed in O(1) memory.

A balanced Feistel network permutes [0, 4^h) for the least h with 4^h >= num_samples; ids that fall outside
[0, num_samples) are sent through again until they fall inside ("cycle walking": Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002), which permutes exactly [0, num_samples). Fewer than 4 passes are
expected.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError

_ROUNDS = 8
_BLOCK = 1 << 13  # positions permuted at once


def num_samples(num_tokens: int, context: int) -> int:
    """Samples in a split: windows of context + 1 tokens with stride context.

    Raises:
        DataError: the split is shorter than one window.
    """
    count = (num_tokens - 1) // context
    if count < 1:
        raise DataError(f"{num_tokens} tokens hold no window of context + 1 = {context + 1} tokens")
    return count


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Permutation:
    """A pseudo-random bijection of [0, size), the same on every machine for the same key."""

    def __init__(self, size: int, key: bytes) -> None:
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        material = hashlib.shake_128(key).digest(8 * _ROUNDS)
        self._round_keys = np.frombuffer(material, dtype="<u8").astype(np.uint64)

    def _network(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = ids >> self._half_bits, ids & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half_bits) | right

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Image of each position; int64 [n] in [0, size) -> int64 [n] in [0, size)."""
        ids = self._network(positions.astype(np.uint64))
        outside = np.flatnonzero(ids >= self.size)
        while outside.size:
            ids[outside] = self._network(ids[outside])
            outside = outside[ids[outside] >= self.size]
        return ids.astype(np.int64)


class SampleOrder:
    """Maps consumption positions 0, 1, 2, ... to sample ids; epoch e has the permutation keyed by (seed, e).

    The answer for a position depends on (num_samples, seed) alone, so it is the same for any number of ranks,
    micro-batch size and history of resumes.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise DataError(f"an order needs at least one sample, got {num_samples}")
        self.num_samples = num_samples
        self.seed = seed
        self._epoch = -1
        self._permutation = Permutation(1, b"")
        self._block_key = (-1, -1)
        self._block: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def _of_block(self, epoch: int, block: int) -> NDArray[np.int64]:
        """Ids of the block's positions; the last block is kept, since small requests follow each other."""
        if (epoch, block) != self._block_key:
            if epoch != self._epoch:
                self._permutation = Permutation(self.num_samples, f"deeploop order {self.seed} {epoch}".encode())
                self._epoch = epoch
            start = block * _BLOCK
            self._block = self._permutation(np.arange(start, min(start + _BLOCK, self.num_samples), dtype=np.int64))
            self._block_key = (epoch, block)
        return self._block

    def ids_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids at any positions; int64 [n] -> int64 [n]."""
        epochs, within = np.divmod(positions, self.num_samples)
        blocks, places = np.divmod(within, _BLOCK)
        keys = epochs * (self.num_samples // _BLOCK + 1) + blocks
        ids = np.empty_like(within)
        for key in np.unique(keys).tolist():
            here = keys == key
            first = int(np.argmax(here))
            ids[here] = self._of_block(int(epochs[first]), int(blocks[first]))[places[here]]
        return ids

    def sample_ids(self, start: int, count: int) -> NDArray[np.int64]:
        """Sample ids at positions start .. start + count - 1; int64 [count]."""
        return self.ids_at(np.arange(start, start + count, dtype=np.int64))
