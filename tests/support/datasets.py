"""Dataset folders made of given tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.durable import sha256_of_file
from data_prep.manifest import Inputs, Manifest, Shard, Split, TokenizerRecord
from data_prep.megatron import TOKEN_DTYPES, write_index
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.training import train_sentencepiece

TEXTS = ["def area(width, height):\n    return width * height\n", "for index in range(10):\n    print(index)\n"] * 60


def write_dataset(
    folder: Path,
    splits: Mapping[str, Sequence[NDArray[np.int64]]],
    *,
    dtype: str = "uint16",
    vocab_size: int = 65_000,
    document_lengths: Sequence[int] | None = None,
) -> Manifest:
    """Writes a dataset of the given shards of tokens; each shard is one document unless lengths are given."""
    folder.mkdir(parents=True, exist_ok=True)
    records: dict[str, Split] = {}
    for split, shards in splits.items():
        written = []
        for number, tokens in enumerate(shards):
            prefix = f"corpus-{split}-{number:05}"
            bin_file, idx_file = folder / f"{prefix}.bin", folder / f"{prefix}.idx"
            bin_file.write_bytes(tokens.astype(TOKEN_DTYPES[dtype]).tobytes())
            lengths = np.array(document_lengths or [len(tokens)], dtype=np.int32)
            with idx_file.open("wb") as file:
                write_index(file, dtype, lengths)
            written.append(
                Shard(
                    prefix,
                    len(tokens),
                    len(lengths),
                    bin_file.stat().st_size,
                    idx_file.stat().st_size,
                    sha256_of_file(bin_file),
                    sha256_of_file(idx_file),
                )
            )
        total = sum(shard.tokens for shard in written)
        documents = sum(shard.documents for shard in written)
        records[split] = Split(total, documents, total, tuple(written))
    manifest = Manifest(
        name="corpus",
        document_rule="text eos",
        dtype=dtype,
        tokenizer=TokenizerRecord("sentencepiece", None, None, "test", vocab_size, 0, None, {}),
        splits=records,
        inputs=Inputs(files=0, bytes=0, fingerprint="", content=""),
        rejected={},
        settings={},
        command="",
    )
    manifest.save(folder)
    return manifest


def write_text_dataset(folder: Path) -> Tokenizer:
    """A dataset of `TEXTS` that carries its tokenizer, which is returned."""
    folder.mkdir()
    model = folder / "tokenizer.model"
    model.write_bytes(train_sentencepiece(TEXTS, 320, "bpe"))
    tokenizer = load_tokenizer(model)
    tokens = np.array([i for text in TEXTS for i in [*tokenizer.encode(text), tokenizer.eos_id]], dtype=np.int64)
    manifest = write_dataset(folder, {"train": [tokens], "validation": [tokens[:200]]}, vocab_size=tokenizer.vocab_size)
    dataclasses.replace(manifest, tokenizer=tokenizer.record()).save(folder)
    return tokenizer
