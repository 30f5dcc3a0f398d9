"""Reading tokens back: windows over a split's whole token stream, memory-mapped, shards opened when needed.

Legend of shapes: B windows, L tokens in a window.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.manifest import Manifest, load_manifest
from data_prep.megatron import TOKEN_DTYPES
from data_prep.shards import bin_path

_OPEN_SHARDS = 256  # each open map holds a file descriptor; the usual limit is 1,024


class TokenSplit:
    """One split of a dataset folder as a single stream of `num_tokens` tokens.

    Make it with `open_split`. Safe to use from one thread at a time.
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
        self._open: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def _tokens_of(self, shard: int) -> NDArray[Any]:
        """The shard's tokens as a view of its memory map; [tokens]."""
        tokens = self._open.get(shard)
        if tokens is None:
            path = bin_path(self.folder, self._shards[shard].prefix)
            try:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise DataError(f"{path}: cannot be mapped ({error})") from error
            tokens = np.frombuffer(mapped, dtype=self._dtype)
            self._open[shard] = tokens
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(shard)
        return tokens

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
        shards = np.searchsorted(self._first_token, starts, side="right") - 1
        offsets = starts - self._first_token[shards]
        for row, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
            piece = self._tokens_of(shard)[offset : offset + length]
            tokens_BL[row, : len(piece)] = piece
            filled = len(piece)
            while filled < length:
                shard += 1
                piece = self._tokens_of(shard)[: length - filled]
                tokens_BL[row, filled : filled + len(piece)] = piece
                filled += len(piece)
        return tokens_BL


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
