"""Documents as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.errors import DataError
from data_prep.manifest import load_manifest
from data_prep.megatron import read_index
from data_prep.shards import bin_path, idx_path, map_tokens
from data_prep.tokenizer import load_tokenizer


def document_ids(folder: Path, split: str, first: int, count: int) -> Iterator[tuple[int, list[int]]]:
    """(number, ids) of documents first .. first + count - 1 of a split.

    Raises:
        DataError: no such split, or no document of that number.
    """
    manifest = load_manifest(folder)
    if split not in manifest.splits:
        raise DataError(f"{folder}: no split {split!r}; it has {', '.join(sorted(manifest.splits))}")
    documents = manifest.splits[split].documents
    if not 0 <= first < documents:
        raise DataError(f"{folder} ({split}): no document {first}; there are {documents}, counted from 0")
    seen = 0
    for shard in manifest.splits[split].shards:
        low, high = max(first, seen) - seen, min(first + count, seen + shard.documents) - seen
        if low < high:
            index = read_index(idx_path(folder, shard.prefix))
            tokens = map_tokens(bin_path(folder, shard.prefix), manifest.dtype)
            edges = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])[index.documents]
            for number in range(low, high):
                yield seen + number, tokens[edges[number] : edges[number + 1]].tolist()
        seen += shard.documents


def documents_as_text(folder: Path, split: str, first: int, count: int) -> Iterator[tuple[int, int, str]]:
    """(number, tokens, text) of each; the ids themselves where an adopted dataset names no tokenizer."""
    named = load_manifest(folder).tokenizer.file is not None
    tokenizer = load_tokenizer(folder) if named else None
    for number, ids in document_ids(folder, split, first, count):
        text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        yield number, len(ids), text
