"""Tokenizing a corpus into a dataset folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.durable import atomic_file, fsync_folder, sha256_of_file
from data_prep.errors import DataError
from data_prep.manifest import MANIFEST_NAME, Inputs, Manifest, Shard, Split, load_manifest
from data_prep.megatron import TOKEN_DTYPES, dtype_for_vocab, write_index
from data_prep.split import SPLITS, split_of
from data_prep.tokenizer import Tokenizer

BUILDING = ".building"


@dataclass
class _Writer:
    """One shard pair being written."""

    folder: Path
    prefix: str
    dtype: str
    lengths: list[int] = field(default_factory=list)
    text_bytes: int = 0

    def __post_init__(self) -> None:
        self._file = (self.folder / f"{self.prefix}.bin").open("wb")

    def add(self, ids: list[int], text_bytes: int) -> None:
        self._file.write(np.array(ids, dtype=TOKEN_DTYPES[self.dtype]).tobytes())
        self.lengths.append(len(ids))
        self.text_bytes += text_bytes

    def close(self) -> Shard:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        bin_file, idx_file = (self.folder / f"{self.prefix}.{end}" for end in ("bin", "idx"))
        with atomic_file(idx_file) as file:
            write_index(file, self.dtype, np.array(self.lengths, dtype=np.int32))
        return Shard(
            prefix=self.prefix,
            tokens=sum(self.lengths),
            documents=len(self.lengths),
            bin_bytes=bin_file.stat().st_size,
            idx_bytes=idx_file.stat().st_size,
            bin_sha256=sha256_of_file(bin_file),
            idx_sha256=sha256_of_file(idx_file),
        )


def fingerprint(root: Path, files: list[Path]) -> Inputs:
    """Names, sizes and contents of the input files."""
    digest, size = hashlib.sha256(), 0
    for path in files:
        size += path.stat().st_size
        digest.update(f"{path.relative_to(root).as_posix()}\0{sha256_of_file(path)}\0".encode())
    return Inputs(files=len(files), bytes=size, fingerprint=digest.hexdigest())


def is_finished(out: Path, inputs: Inputs, settings: dict[str, Any], tokenizer_sha256: str | None) -> bool:
    """Whether `out` already holds this very dataset.

    Raises:
        DataError: it holds another one.
    """
    if not (out / MANIFEST_NAME).exists():
        return False
    manifest = load_manifest(out)
    found = {
        "inputs": manifest.inputs.fingerprint,
        "tokenizer": manifest.tokenizer.sha256,
        **manifest.settings,
    }
    wanted = {"inputs": inputs.fingerprint, "tokenizer": tokenizer_sha256, **settings}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise DataError(
                f"{out}: holds a finished dataset with {key} = {found.get(key)!r}, now {value!r}; give another --out"
            )
    return True


def documents(files: list[Path], rejected: dict[str, int]) -> Iterator[str]:
    """Text of each file; files that are not UTF-8 or are empty are counted in `rejected`."""
    for path in files:
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            rejected["invalid_utf8"] = rejected.get("invalid_utf8", 0) + 1
            continue
        if text:
            yield text
        else:
            rejected["empty"] = rejected.get("empty", 0) + 1


def tokenize(
    files: list[Path],
    inputs: Inputs,
    tokenizer: Tokenizer,
    tokenizer_file: Path,
    out: Path,
    name: str,
    validation_fraction: float,
    settings: dict[str, Any],
    command: str,
) -> Manifest:
    """Writes the dataset folder `out`; its manifest comes last.

    Raises:
        DataError: no document survives.
    """
    building = out / BUILDING
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    dtype = dtype_for_vocab(tokenizer.vocab_size)
    writers = {split: _Writer(building, f"{name}-{split}-00000", dtype) for split in SPLITS}
    rejected: dict[str, int] = {}
    for text in documents(files, rejected):
        utf8 = text.encode()
        writer = writers[split_of(utf8, validation_fraction)]
        writer.add([*tokenizer.encode(text), tokenizer.eos_id], len(utf8))
    shards = {split: writer.close() for split, writer in writers.items()}
    if not any(shard.documents for shard in shards.values()):
        shutil.rmtree(building)
        raise DataError(f"the corpus holds no document to tokenize ({len(files)} files, rejected: {rejected})")
    stored_tokenizer = out / tokenizer_file.name
    if not (stored_tokenizer.exists() and stored_tokenizer.samefile(tokenizer_file)):
        with atomic_file(stored_tokenizer) as file:
            file.write(tokenizer_file.read_bytes())
    splits: dict[str, Split] = {}
    for split, shard in shards.items():
        if not shard.documents:
            continue
        for end in ("bin", "idx"):
            (building / f"{shard.prefix}.{end}").replace(out / f"{shard.prefix}.{end}")
        splits[split] = Split(shard.tokens, shard.documents, writers[split].text_bytes, (shard,))
    fsync_folder(out)
    manifest = Manifest(name, dtype, tokenizer.record(), splits, inputs, rejected, settings, command)
    manifest.save(out)
    shutil.rmtree(building)
    return manifest
