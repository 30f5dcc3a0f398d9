"""Reading tokens back: windows over a split's whole token stream, memory-mapped, shards opened when needed.

Legend of shapes: B windows, L tokens in a window.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.manifest import Manifest, load_manifest
from data_prep.megatron import TOKEN_DTYPES
from data_prep.shards import bin_path

_OPEN_SHARDS = 256  # each open map holds a file descriptor; the usual limit is 1,024
_MAPPED_BYTES = 1 << 28  # of touched pages, after which all are let go
_FAULT_BYTES = 1 << 16  # Linux maps so much of the page cache around a page that is touched


class _OpenShard(NamedTuple):
    mapped: mmap.mmap
    tokens: NDArray[Any]  # [tokens], a view of the map


class TokenSplit:
    """One split of a dataset folder as a single stream of `num_tokens` tokens.

    Make it with `open_split`. Safe to use from one thread at a time. What has been read stays in the page cache, but
    of this process's memory it never holds more than 256 MiB.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        self.folder = folder
        self.split = split
        self.manifest = manifest
        self.vocab_size = manifest.tokenizer.vocab_size
        self.num_tokens = manifest.splits[split].tokens
        self._shards = [shard for shard in manifest.splits[split].shards if shard.tokens]
        self._first_token = np.concatenate(
            [[0], np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)]
        ).astype(np.int64)
        self._dtype = TOKEN_DTYPES[manifest.dtype]
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._touched = 0  # at most so many bytes of the maps are resident

    def _opened(self, shard: int) -> _OpenShard:
        opened = self._open.get(shard)
        if opened is None:
            path = bin_path(self.folder, self._shards[shard].prefix)
            try:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise DataError(f"{path}: cannot be mapped ({error})") from error
            opened = _OpenShard(mapped, np.frombuffer(mapped, dtype=self._dtype))
            self._open[shard] = opened
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(shard)
        return opened

    def _let_go(self, windows: int, length: int) -> None:
        """Counts what reading these windows touches; drops the mapped pages when there are too many."""
        self._touched += windows * (length * self._dtype.itemsize + _FAULT_BYTES)
        if self._touched > _MAPPED_BYTES:
            for opened in self._open.values():
                opened.mapped.madvise(mmap.MADV_DONTNEED)
            self._touched = 0

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The `length` tokens from each offset on; may cross documents and shards.

        Args:
            starts: int64 [B], offsets in tokens from the beginning of the split.
            length: L, tokens per window.

        Returns:
            int64 [B, L].

        Raises:
            DataError: a window does not lie inside the split, or a shard cannot be opened.
        """
        starts = np.asarray(starts, dtype=np.int64)
        tokens_BL = np.empty((len(starts), length), dtype=np.int64)
        if not tokens_BL.size:
            return tokens_BL
        if starts.min() < 0 or int(starts.max()) + length > self.num_tokens:
            raise DataError(
                f"{self.folder} ({self.split}): a window of {length} tokens begins at {starts.min()} or "
                f"{starts.max()}, outside its {self.num_tokens} tokens"
            )
        first_shards = np.searchsorted(self._first_token, starts, side="right") - 1
        last_shards = np.searchsorted(self._first_token, starts + length - 1, side="right") - 1
        offsets = starts - self._first_token[first_shards]
        inside = first_shards == last_shards
        for shard, rows in _grouped(first_shards, np.flatnonzero(inside)):
            opened = self._opened(shard)
            count = len(opened.tokens) - length + 1
            # Row i holds the tokens from i on; choosing rows copies them without a step of Python for each.
            item = self._dtype.itemsize
            every_window: NDArray[Any] = np.ndarray((count, length), self._dtype, opened.mapped, strides=(item, item))
            tokens_BL[rows] = every_window[offsets[rows]]
        for row in np.flatnonzero(~inside).tolist():
            self._join(tokens_BL[row], int(first_shards[row]), int(offsets[row]))
        self._let_go(len(starts), length)
        return tokens_BL

    def _join(self, window_L: NDArray[np.int64], shard: int, offset: int) -> None:
        """Fills one window that crosses from shard to shard."""
        filled = 0
        while filled < len(window_L):
            piece = self._opened(shard).tokens[offset : offset + len(window_L) - filled]
            window_L[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard, offset = shard + 1, 0


def _grouped(shards: NDArray[np.int64], rows: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """(shard, its rows) for each shard among `shards[rows]`, in order."""
    rows = rows[np.argsort(shards[rows], kind="stable")]
    edges = np.flatnonzero(np.diff(shards[rows], prepend=-1, append=-1))
    for start, end in pairwise(edges.tolist()):
        yield int(shards[rows[start]]), rows[start:end]


def open_split(path: Path, split: str) -> TokenSplit:
    """Opens one split of a dataset folder. Checks that every `.bin` is there with the size in the manifest.

    Raises:
        DataError: not a finished dataset folder, no such split, or files missing or of another size.
    """
    path = Path(path)
    manifest = load_manifest(path)
    if split not in manifest.splits:
        raise DataError(f"{path}: no split {split!r}; it has {', '.join(sorted(manifest.splits)) or 'none'}")
    for shard in manifest.splits[split].shards:
        file = bin_path(path, shard.prefix)
        try:
            size = file.stat().st_size
        except OSError as error:
            raise DataError(f"{file}: named in the manifest but cannot be read ({error.strerror})") from error
        if size != shard.bin_bytes:
            raise DataError(f"{file}: {size} bytes, the manifest says {shard.bin_bytes}; copy or make it again")
    return TokenSplit(path, split, manifest)
