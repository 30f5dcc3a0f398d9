"""Which document each token of a window belongs to, for attention that stays within documents.

Windows stay those of the stream, so no token is lost or padded. Documents are known from the shards' indexes, so the
ids are exact whatever token separates documents, and where none does. Indexes are memory-mapped and searched: of a
corpus of any size only the pages on the way to a window are read.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from data_prep.megatron import Index, read_index
from data_prep.reader import TokenSplit
from data_prep.shards import idx_path

_OPEN_INDEXES = 128  # each holds a file descriptor, beside the reader's


class Documents:
    """The documents of a split. Safe to use from one thread at a time."""

    def __init__(self, split: TokenSplit) -> None:
        self._split = split
        self._shards = [shard for shard in split.manifest.splits[split.split].shards if shard.tokens]
        counts = np.array([[shard.tokens, shard.documents] for shard in self._shards], dtype=np.int64)
        # Tokens and documents before each shard, and in all.
        self._first_token, self._first_document = np.concatenate([np.zeros((1, 2), np.int64), counts.cumsum(0)]).T
        self._open: OrderedDict[int, Index] = OrderedDict()

    def _opened(self, shard: int) -> Index:
        if shard not in self._open:
            self._open[shard] = read_index(idx_path(self._split.folder, self._shards[shard].prefix))
            if len(self._open) > _OPEN_INDEXES:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]

    def document_ids(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Document of each token of the windows, counted from 0 over the split.

        Args:
            starts: int64 [B], offsets in tokens from the beginning of the split; the windows lie inside it.
            length: L, tokens per window.

        Returns:
            int64 [B, L].

        Raises:
            DataError: an index is missing or damaged.
        """
        ids_BL = np.empty((len(starts), length), dtype=np.int64)
        for ids_L, start in zip(ids_BL, np.asarray(starts).tolist(), strict=True):
            shard = int(np.searchsorted(self._first_token, start, side="right")) - 1
            filled = 0
            while filled < length:
                offset = start + filled - int(self._first_token[shard])
                count = min(length - filled, self._shards[shard].tokens - offset)
                ids_L[filled : filled + count] = self._within(shard, offset, count)
                filled += count
                shard += 1
        return ids_BL

    def _within(self, shard: int, offset: int, count: int) -> NDArray[np.int64]:
        """Documents of `count` tokens of one shard; int64 [count]."""
        index = self._opened(shard)
        item = index.dtype.itemsize
        # Sequences begin at ascending places, and so do documents among the sequences.
        first = int(np.searchsorted(index.pointers, offset * item, side="right")) - 1
        last = int(np.searchsorted(index.pointers, (offset + count) * item, side="left"))
        sequences = np.arange(first, last)
        documents = np.searchsorted(index.documents, sequences, side="right") - 1
        edges = np.clip(index.pointers[first:last] // item - offset, 0, count)
        return np.repeat(documents + self._first_document[shard], np.diff(edges, append=count))
