"""Datasets made of other datasets: merged, converted, adopted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.durable import atomic_file, fsync_folder, sha256_of_file
from data_prep.errors import DataError
from data_prep.manifest import (
    MANIFEST_NAME,
    REPORT_NAME,
    Inputs,
    Manifest,
    Shard,
    Split,
    TokenizerRecord,
    load_manifest,
)
from data_prep.megatron import TOKEN_DTYPES, dtype_for_vocab
from data_prep.shards import CHUNK_TOKENS, bin_path, describe, idx_path, map_tokens, split_of_shards, write_shard
from data_prep.tokenizer import load_tokenizer

# llm.c's header: 256 int32, of which magic, version and token count are used (dev/data/data_common.py).
_LLMC_HEADER = 256 * 4
_LLMC_KINDS: dict[str, tuple[int, int, np.dtype[Any]]] = {
    "uint16": (20240520, 1, np.dtype("<u2")),
    "int32": (20240801, 7, np.dtype("<u4")),
}
FOREIGN = ("nanogpt", "llmc")


def _require_new(out: Path) -> None:
    if (out / MANIFEST_NAME).exists():
        raise DataError(f"{out}: holds a dataset already; give another --out")
    out.mkdir(parents=True, exist_ok=True)


def _link_or_copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        with source.open("rb") as content, atomic_file(target) as file:
            shutil.copyfileobj(content, file, 1 << 20)


def merge(folders: Sequence[Path], out: Path, name: str) -> Manifest:
    """Joins datasets of one tokenizer, in the given order; shards are hard links where the file system allows.

    Raises:
        DataError: they differ in tokenizer, dtype, document rule or validation fraction, or `out` is taken.
    """
    manifests = [load_manifest(folder) for folder in folders]
    first = manifests[0]
    for folder, manifest in zip(folders, manifests, strict=True):
        pairs = {
            "tokenizer": (manifest.tokenizer.sha256, first.tokenizer.sha256),
            "vocab_size": (manifest.tokenizer.vocab_size, first.tokenizer.vocab_size),
            "eos_id": (manifest.tokenizer.eos_id, first.tokenizer.eos_id),
            "dtype": (manifest.dtype, first.dtype),
            "document_rule": (manifest.document_rule, first.document_rule),
            # With another fraction the same document could lie in both splits.
            "validation_fraction": tuple(made.settings.get("validation_fraction") for made in (manifest, first)),
        }
        for key, (found, wanted) in pairs.items():
            if found != wanted:
                raise DataError(f"{folder}: {key} is {found!r}, but {folders[0]} has {wanted!r}; they cannot be merged")
    _require_new(out)
    splits: dict[str, Split] = {}
    for split in dict.fromkeys(split for manifest in manifests for split in manifest.splits):
        shards: list[Shard] = []
        texts: list[int | None] = []
        for folder, manifest in zip(folders, manifests, strict=True):
            if split not in manifest.splits:
                continue
            texts.append(manifest.splits[split].text_bytes)
            for shard in manifest.splits[split].shards:
                prefix = f"{name}-{split}-{len(shards):05}"
                _link_or_copy(bin_path(folder, shard.prefix), bin_path(out, prefix))
                _link_or_copy(idx_path(folder, shard.prefix), idx_path(out, prefix))
                shards.append(Shard(**{**vars(shard), "prefix": prefix}))
        known = [text for text in texts if text is not None]
        splits[split] = split_of_shards(shards, sum(known) if len(known) == len(texts) else None)
    if first.tokenizer.file is not None:
        _link_or_copy(folders[0] / first.tokenizer.file, out / first.tokenizer.file)
    rejected: dict[str, int] = {}
    for manifest in manifests:
        for reason, count in manifest.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
    fingerprints = [manifest.fingerprint for manifest in manifests]
    merged = Manifest(
        name=name,
        document_rule=first.document_rule,
        dtype=first.dtype,
        tokenizer=first.tokenizer,
        splits=splits,
        inputs=Inputs(
            files=sum(manifest.inputs.files for manifest in manifests),
            bytes=sum(manifest.inputs.bytes for manifest in manifests),
            fingerprint=_joined(manifest.inputs.fingerprint for manifest in manifests),
            content=_joined(manifest.inputs.content for manifest in manifests),
        ),
        rejected=rejected,
        settings={"merged": fingerprints, "validation_fraction": first.settings.get("validation_fraction")},
        command=f"python -m data_prep merge --name {name} {' '.join(folder.name for folder in folders)}",
    )
    _join_reports(folders, out)
    fsync_folder(out)
    merged.save(out)
    return merged


def _join_reports(folders: Sequence[Path], out: Path) -> None:
    """Joins the lists of rejected records, each with the dataset that it was left out of."""
    with atomic_file(out / REPORT_NAME) as report:
        for folder in folders:
            if (folder / REPORT_NAME).exists():
                with (folder / REPORT_NAME).open("rb") as lines:
                    for line in lines:
                        report.write(json.dumps({"dataset": folder.name, **json.loads(line)}).encode() + b"\n")


def _joined(digests: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def export(folder: Path, kind: str, out: Path) -> list[Path]:
    """Writes a dataset as nanoGPT's `train.bin` and `val.bin`, or as llm.c's, one file per split.

    Raises:
        DataError: nanoGPT's uint16 cannot hold the vocabulary, or llm.c's header not the number of tokens.
    """
    manifest = load_manifest(folder)
    if kind == "nanogpt" and manifest.tokenizer.vocab_size > 1 << 16:
        raise DataError(f"{folder}: a vocabulary of {manifest.tokenizer.vocab_size}; nanoGPT's files hold uint16")
    out.mkdir(parents=True, exist_ok=True)
    magic, version, wide = _LLMC_KINDS[manifest.dtype]
    written = []
    for name, split in manifest.splits.items():
        path = out / f"{'val' if name == 'validation' else name}.bin"
        if kind == "llmc" and split.tokens >= 1 << 31:
            raise DataError(f"{folder}: {split.tokens} tokens in {name}; llm.c's header holds 2^31 - 1")
        with atomic_file(path) as file:
            if kind == "llmc":
                header = np.zeros(256, dtype="<i4")
                header[:3] = magic, version, split.tokens
                file.write(header.tobytes())
            for shard in split.shards:
                tokens = map_tokens(bin_path(folder, shard.prefix), manifest.dtype)
                for start in range(0, len(tokens), CHUNK_TOKENS):
                    block = tokens[start : start + CHUNK_TOKENS]
                    file.write(block.astype(wide if kind == "llmc" else "<u2").tobytes())
        written.append(path)
    return written


def _foreign_tokens(path: Path, kind: str) -> NDArray[np.integer]:
    """The tokens of a nanoGPT or llm.c file, mapped."""
    try:
        size = path.stat().st_size
        header = np.fromfile(path, "<i4", 3) if kind == "llmc" else np.empty(0, "<i4")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if kind == "nanogpt":
        if size == 0 or size % 2:
            raise DataError(f"{path}: {size} bytes; expected a non-empty file of uint16")
        return np.memmap(path, dtype="<u2", mode="r")
    for magic, version, dtype in _LLMC_KINDS.values():
        if header.tolist()[:2] == [magic, version]:
            expected = _LLMC_HEADER + int(header[2]) * dtype.itemsize
            if size != expected:
                raise DataError(f"{path}: {size} bytes, but its header promises {header[2]} tokens, {expected} bytes")
            return np.memmap(path, dtype=dtype, mode="r", offset=_LLMC_HEADER)
    raise DataError(f"{path}: begins with {header.tolist()}; expected llm.c's magic and version")


def _checked_blocks(path: Path, tokens: NDArray[np.integer], vocab_size: int) -> Iterator[NDArray[np.integer]]:
    for start in range(0, len(tokens), CHUNK_TOKENS):
        block = tokens[start : start + CHUNK_TOKENS]
        if block.max() >= vocab_size:
            raise DataError(f"{path}: holds token {block.max()}; --vocab-size is {vocab_size}")
        yield block


def import_foreign(
    files: Mapping[str, Sequence[Path]], kind: str, out: Path, name: str, vocab_size: int, eos_id: int
) -> Manifest:
    """Makes a dataset of nanoGPT's or llm.c's files, a shard each; a document ends after each EOS.

    Raises:
        DataError: a file is not of that kind, a token lies outside the vocabulary, or `out` is taken.
    """
    _require_new(out)
    dtype = dtype_for_vocab(vocab_size)
    splits: dict[str, Split] = {}
    for split, paths in files.items():
        shards = []
        for number, path in enumerate(paths):
            tokens = _foreign_tokens(path, kind)
            blocks = _checked_blocks(path, tokens, vocab_size)
            shards.append(write_shard(out, f"{name}-{split}-{number:05}", dtype, blocks, eos_id))
        if shards:
            splits[split] = split_of_shards(shards, None)
    flat = [path for paths in files.values() for path in paths]
    tokenizer = TokenizerRecord(f"unknown ({kind})", None, None, "", vocab_size, eos_id, None, {})
    return _save_foreign(out, name, dtype, tokenizer, splits, flat, f"convert --from {kind}")


def adopt(
    prefixes: Mapping[str, Sequence[str]],
    folder: Path,
    name: str,
    vocab_size: int | None,
    eos_id: int | None,
    tokenizer_file: Path | None,
) -> Manifest:
    """Writes a manifest beside Megatron pairs made elsewhere; the pairs are left as they are.

    Args:
        prefixes: split -> paths inside `folder`, without suffix.

    Raises:
        DataError: a pair is missing or damaged, its dtype is neither uint16 nor int32, pairs differ in dtype, or
            neither a tokenizer nor a vocabulary size is given.
    """
    if (folder / MANIFEST_NAME).exists():
        raise DataError(f"{folder}: has a {MANIFEST_NAME} already")
    names = {dtype: key for key, dtype in TOKEN_DTYPES.items()}
    dtypes: set[str] = set()
    splits: dict[str, Split] = {}
    for split, found in prefixes.items():
        shards = []
        for prefix in found:
            shard, index = describe(folder, prefix)
            if index.dtype not in names:
                raise DataError(f"{idx_path(folder, prefix)}: dtype {index.dtype}; uint16 and int32 can be adopted")
            dtypes.add(names[index.dtype])
            shards.append(shard)
        if shards:
            splits[split] = split_of_shards(shards, None)
    if len(dtypes) != 1:
        raise DataError(f"{folder}: the pairs hold {' and '.join(sorted(dtypes)) or 'nothing'}; expected one dtype")
    if tokenizer_file is not None:
        record = load_tokenizer(tokenizer_file).record()
        target = folder / tokenizer_file.name
        if not (target.exists() and target.samefile(tokenizer_file)):
            _link_or_copy(tokenizer_file, target)
    elif vocab_size is not None:
        record = TokenizerRecord("unknown (adopted)", None, None, "", vocab_size, eos_id, None, {})
    else:
        raise DataError("give --tokenizer FILE, or --vocab-size (and --eos-id where documents end with one)")
    paths = [bin_path(folder, shard.prefix) for split in splits.values() for shard in split.shards]
    return _save_foreign(folder, name, dtypes.pop(), record, splits, paths, "adopt")


def _save_foreign(
    folder: Path,
    name: str,
    dtype: str,
    tokenizer: TokenizerRecord,
    splits: dict[str, Split],
    files: Sequence[Path],
    how: str,
) -> Manifest:
    content = _joined(sha256_of_file(path) for path in files)
    manifest = Manifest(
        name=name,
        document_rule="unknown",
        dtype=dtype,
        tokenizer=tokenizer,
        splits=splits,
        inputs=Inputs(len(files), sum(path.stat().st_size for path in files), content, content),
        rejected={},
        settings={"made_by": how},
        command=f"python -m data_prep {how}",
    )
    manifest.save(folder)
    return manifest
