"""Document-aligned packing: windows in which tokens attend only within their own document.

Windows stay those of the stream, so no token is lost or padded; `document_ids` says which document each token of a
window belongs to, and `document_mask` turns that into an attention mask. Where documents are known from the index,
the result is exact for every stream, whatever its EOS rule.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data_prep.megatron import read_index
from data_prep.reader import TokenSplit
from data_prep.shards import idx_path


class DocumentEnds:
    """Offsets at which the documents of a split end, read from the shards' indexes; 8 bytes a document."""

    def __init__(self, split: TokenSplit) -> None:
        ends, first = [], 0
        for shard in split.manifest.splits[split.split].shards:
            index = read_index(idx_path(split.folder, shard.prefix))
            edges = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])
            ends.append(edges[index.documents[1:]] + first)
            first += shard.tokens
        self._ends = np.concatenate(ends)

    def document_ids(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Document of each token of the windows, counted from 0 over the split; int64 [B, length]."""
        offsets = np.asarray(starts, dtype=np.int64)[:, None] + np.arange(length)
        return np.searchsorted(self._ends, offsets, side="right").astype(np.int64)

    def positions(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Position of each token in its document's part of the window, from 0; int64 [B, length]."""
        ids = self.document_ids(starts, length)
        places = np.broadcast_to(np.arange(length), ids.shape)
        begins = np.concatenate([np.ones((len(ids), 1), dtype=bool), ids[:, 1:] != ids[:, :-1]], axis=1)
        first: NDArray[np.int64] = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        return np.subtract(places, first, dtype=np.int64)


def document_mask(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True where the query (rows) may attend to the key: same document, not later; [B, L] -> bool [B, L, L]."""
    length = ids.shape[1]
    causal = np.tril(np.ones((length, length), dtype=bool))
    mask: NDArray[np.bool_] = (ids[:, :, None] == ids[:, None, :]) & causal
    return mask
