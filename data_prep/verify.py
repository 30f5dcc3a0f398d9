"""Checking a dataset folder against its manifest, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.durable import sha256_of_file
from data_prep.errors import DataError
from data_prep.manifest import Manifest, Shard, load_manifest
from data_prep.megatron import TOKEN_DTYPES, Index
from data_prep.shards import CHUNK_TOKENS, bin_path, describe, idx_path, map_tokens


def _index_problems(shard: Shard, index: Index, manifest: Manifest) -> Iterator[str]:
    if index.dtype != TOKEN_DTYPES[manifest.dtype]:
        yield f"holds {index.dtype}, the manifest says {manifest.dtype}"
    expected = np.cumsum(index.lengths, dtype=np.int64) - index.lengths
    if not np.array_equal(index.pointers, expected * index.dtype.itemsize):
        yield "pointers do not follow from the lengths"
    documents = index.documents
    if documents[0] != 0 or documents[-1] != len(index.lengths) or (np.diff(documents) < 0).any():
        yield "document indices do not run from 0 to the number of sequences"


def _token_problems(folder: Path, shard: Shard, index: Index, manifest: Manifest) -> Iterator[str]:
    tokens = map_tokens(bin_path(folder, shard.prefix), manifest.dtype)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        block = tokens[start : start + CHUNK_TOKENS]
        if block.min() < 0 or block.max() >= manifest.tokenizer.vocab_size:
            bad = start + int(np.flatnonzero((block < 0) | (block >= manifest.tokenizer.vocab_size))[0])
            yield f"token {tokens[bad]} at offset {bad}, outside the vocabulary of {manifest.tokenizer.vocab_size}"
            return
    ends = np.cumsum(index.lengths, dtype=np.int64)[index.documents[1:] - 1] - 1
    if manifest.document_rule.endswith("eos"):
        wrong = np.flatnonzero(tokens[ends] != manifest.tokenizer.eos_id)
        if wrong.size:
            yield f"document {wrong[0]} does not end with the EOS token {manifest.tokenizer.eos_id}"


def _shard_problems(folder: Path, shard: Shard, manifest: Manifest) -> Iterator[str]:
    try:
        found, index = describe(folder, shard.prefix)
    except DataError as error:
        yield str(error)
        return
    for key in ("tokens", "documents", "bin_bytes", "idx_bytes", "bin_sha256", "idx_sha256"):
        if getattr(found, key) != getattr(shard, key):
            path = (idx_path if key.startswith("idx") else bin_path)(folder, shard.prefix)
            yield f"{path}: {key} is {getattr(found, key)}, the manifest says {getattr(shard, key)}"
    for problem in _index_problems(shard, index, manifest):
        yield f"{idx_path(folder, shard.prefix)}: {problem}"
        return
    for problem in _token_problems(folder, shard, index, manifest):
        yield f"{bin_path(folder, shard.prefix)}: {problem}"


def problems(folder: Path) -> Iterator[str]:
    """Everything in which the folder differs from what its manifest promises, a line each."""
    manifest = load_manifest(folder)
    record = manifest.tokenizer
    if record.file is not None:
        path = folder / record.file
        if not path.is_file():
            yield f"{path}: the tokenizer is missing"
        elif sha256_of_file(path) != record.sha256:
            yield f"{path}: is not the tokenizer that the manifest names"
    for name, split in manifest.splits.items():
        for key in ("tokens", "documents"):
            total = sum(getattr(shard, key) for shard in split.shards)
            if total != getattr(split, key):
                yield f"{folder}: {name} has {total} {key} in its shards, the manifest says {getattr(split, key)}"
        for shard in split.shards:
            yield from _shard_problems(folder, shard, manifest)
