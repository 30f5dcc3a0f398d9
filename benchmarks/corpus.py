"""Text and a tokenizer for the benchmarks, from the sources of the running Python's standard library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_prep.sources import stdlib

_DOCUMENT_CHARS = 3000


@cache
def _stdlib_texts() -> list[str]:
    found: list[str] = []
    root = stdlib.stdlib_root()
    for path in stdlib.stdlib_files(root):
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        found += [text[start : start + _DOCUMENT_CHARS] for start in range(0, len(text), _DOCUMENT_CHARS)]
    return found


def texts(size: int) -> Iterator[str]:
    """Documents of about 3 KB, no two the same, of `size` characters in all."""
    total = number = 0
    while total < size:
        for text in _stdlib_texts():
            yield f"{number}\n{text}"
            number += 1
            total += len(text)
            if total >= size:
                break


def train_tokenizer(path: Path) -> None:
    """Writes a byte-level BPE with 8,192 entries as `tokenizer.json`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_stdlib_texts()[:1500], trainer)
    tokenizer.save(str(path))
