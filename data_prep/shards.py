"""Shard pairs on disk: writing one from tokens, and describing one that is there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.durable import atomic_file, sha256_of_file
from data_prep.errors import DataError
from data_prep.manifest import Shard, Split
from data_prep.megatron import TOKEN_DTYPES, Index, read_index, write_index

CHUNK_TOKENS = 1 << 22


def bin_path(folder: Path, prefix: str) -> Path:
    """Path of a shard's tokens."""
    return folder / f"{prefix}.bin"


def idx_path(folder: Path, prefix: str) -> Path:
    """Path of a shard's index."""
    return folder / f"{prefix}.idx"


def map_tokens(path: Path, dtype: str) -> NDArray[np.integer]:
    """A `.bin` as a memory map; [tokens]."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=TOKEN_DTYPES[dtype])
    return np.memmap(path, dtype=TOKEN_DTYPES[dtype], mode="r")


def describe(folder: Path, prefix: str) -> tuple[Shard, Index]:
    """Reads a pair through, for its manifest entry.

    Raises:
        DataError: a file is missing or damaged, or the index does not describe the tokens.
    """
    tokens_file, index_file = bin_path(folder, prefix), idx_path(folder, prefix)
    index = read_index(index_file)
    try:
        size = tokens_file.stat().st_size
    except OSError as error:
        raise DataError(f"{tokens_file}: cannot be read ({error.strerror})") from error
    tokens = int(index.lengths.sum(dtype=np.int64))
    if size != tokens * index.dtype.itemsize:
        raise DataError(f"{tokens_file}: {size} bytes, but {index_file.name} describes {tokens} of {index.dtype}")
    shard = Shard(
        prefix=prefix,
        tokens=tokens,
        documents=len(index.documents) - 1,
        bin_bytes=size,
        idx_bytes=index_file.stat().st_size,
        bin_sha256=sha256_of_file(tokens_file),
        idx_sha256=sha256_of_file(index_file),
    )
    return shard, index


def write_shard(folder: Path, prefix: str, dtype: str, blocks: Iterable[NDArray[np.integer]], eos_id: int) -> Shard:
    """Writes a pair from blocks of tokens; a document ends after each EOS, and at the end."""
    ends: list[NDArray[np.int64]] = []
    total = 0
    with atomic_file(bin_path(folder, prefix)) as file:
        for block in blocks:
            file.write(block.astype(TOKEN_DTYPES[dtype]).tobytes())
            ends.append(np.flatnonzero(block == eos_id) + total + 1)
            total += len(block)
    marks = np.concatenate([np.zeros(1, np.int64), *ends])
    if marks[-1] != total:
        marks = np.append(marks, total)
    lengths = np.diff(marks)
    if lengths.size and lengths.max() >= 1 << 31:
        raise DataError(f"{folder / prefix}: a document of {lengths.max()} tokens; the index format holds 2^31 - 1")
    with atomic_file(idx_path(folder, prefix)) as file:
        write_index(file, dtype, lengths.astype(np.int32))
    return describe(folder, prefix)[0]


def split_of_shards(shards: list[Shard], text_bytes: int | None) -> Split:
    """The split that these shards make."""
    return Split(
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        text_bytes=text_bytes,
        shards=tuple(shards),
    )
