"""From documents to tokens of a piece, encoded in batches: a call for each short document would cost a tenth."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.sources.records import Place
from data_prep.tokenizer import Tokenizer

_SPILL_BYTES = 1 << 24
_BATCH_CHARS = 1 << 18
_MOST_TOKENS = (1 << 31) - 1  # of a document: the index format's int32


@dataclass
class _Tokens:
    """Tokens of one split as they come; beyond 16 MiB they go to a file."""

    spill: Path
    blocks: list[bytes] = field(default_factory=list)
    held: int = 0
    file: Path | None = None

    def add(self, tokens: NDArray[Any]) -> None:
        self.blocks.append(tokens.tobytes())
        self.held += len(self.blocks[-1])
        if self.held > _SPILL_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self.file is None:
            descriptor, name = tempfile.mkstemp(dir=self.spill)
            os.close(descriptor)
            self.file = Path(name)
        with self.file.open("ab") as stream:
            stream.writelines(self.blocks)
        self.blocks, self.held = [], 0

    def result(self) -> bytes | Path:
        if self.file is None:
            return b"".join(self.blocks)
        self._flush()
        return self.file


@dataclass
class _Run:
    """Neighbouring parts of one document in the batch; a long document has a run in each of several batches."""

    split: str
    place: Place
    begins: bool
    parts: int = 0
    ends: bool = False


class Encoder:
    """Collects the documents of a piece, by split.

    `add` raises a DataError where the tokenizer gives an id outside its vocabulary or a document has 2^31 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, bos_id: int | None, dtype: np.dtype[Any], spill: Path) -> None:
        self._tokenizer = tokenizer
        self._bos = [np.array([bos_id], dtype=np.uint32)] if bos_id is not None else []
        self._eos = np.array([tokenizer.eos_id], dtype=np.uint32)
        self._dtype = dtype
        self._spill = spill
        self._tokens: dict[str, _Tokens] = {}
        self._lengths: dict[str, list[int]] = {}
        self._length = 0  # of the document that is open
        self._parts: list[str] = []
        self._chars = 0
        self._runs: list[_Run] = []

    def add(self, parts: Iterable[str], split: str, place: Place) -> None:
        """One document, in parts that encode independently."""
        run = _Run(split, place, begins=True)
        self._runs.append(run)
        for part in parts:
            if self._chars > _BATCH_CHARS:
                self._encode()
                run = _Run(split, place, begins=False)
                self._runs.append(run)
            self._parts.append(part)
            self._chars += len(part)
            run.parts += 1
        run.ends = True

    def _encode(self) -> None:
        encoded = self._tokenizer.encode_batch(self._parts)
        blocks: dict[str, list[NDArray[np.uint32]]] = {}
        first = 0
        for run in self._runs:
            arrays = encoded[first : first + run.parts]
            first += run.parts
            self._check_ids(arrays, run.place)
            if run.begins:
                arrays = self._bos + arrays
            if run.ends:
                arrays.append(self._eos)
            blocks.setdefault(run.split, []).extend(arrays)
            self._length += sum(map(len, arrays))
            if self._length > _MOST_TOKENS:
                raise DataError(f"{run.place.file}: a document of 2^31 tokens or more; the index format holds fewer")
            if run.ends:
                self._lengths.setdefault(run.split, []).append(self._length)
                self._length = 0
        for split, arrays in blocks.items():
            self._tokens.setdefault(split, _Tokens(self._spill)).add(np.concatenate(arrays).astype(self._dtype))
        self._parts, self._chars, self._runs = [], 0, []

    def _check_ids(self, arrays: list[NDArray[np.uint32]], place: Place) -> None:
        for ids in arrays:
            if ids.size and ids.max() >= self._tokenizer.vocab_size:
                raise DataError(
                    f"{place.file}: the tokenizer gave id {ids.max()}, outside its vocabulary of "
                    f"{self._tokenizer.vocab_size}"
                )

    def result(self, split: str) -> tuple[bytes | Path, bytes]:
        """Tokens of one split, in memory or in a file, and the documents' lengths (int32)."""
        if self._runs:
            self._encode()
        tokens = self._tokens[split].result() if split in self._tokens else b""
        return tokens, np.array(self._lengths.get(split, []), dtype="<i4").tobytes()
