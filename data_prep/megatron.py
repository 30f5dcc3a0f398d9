"""The Megatron indexed dataset: raw little-endian tokens (`.bin`) and their MMIDIDX index (`.idx`).

Index layout (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`), all little-endian:

    9 bytes  b"MMIDIDX\\x00\\x00"
    u64      version, 1
    u8       dtype code
    u64      number of sequences S
    u64      number of document indices, D + 1
    int32    x S        sequence lengths in tokens
    int64    x S        byte offset of each sequence in the `.bin`
    int64    x (D + 1)  index of the first sequence of each document, then S

We write one sequence per document, so S = D.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "int32": np.dtype("<i4")}
_CODES = {"uint16": 8, "int32": 4}
_BLOCK = 1 << 20  # documents handled at once, so that memory stays flat


def dtype_for_vocab(vocab_size: int) -> str:
    """Megatron's rule: `uint16` below 65,500 entries, else `int32`."""
    return "uint16" if vocab_size < 65_500 else "int32"


@dataclass(frozen=True)
class Index:
    """A parsed `.idx`, its arrays memory-mapped.

    Shapes: `lengths` int32 [S], `pointers` int64 [S], `documents` int64 [D + 1].
    """

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]


def _length_blocks(lengths: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
    for start in range(0, len(lengths), _BLOCK):
        yield lengths[start : start + _BLOCK]


def write_index(file: BinaryIO, dtype: str, lengths: NDArray[np.int32]) -> None:
    """Writes the index of one-sequence documents of these token counts; `lengths` may be a memory map."""
    count = len(lengths)
    item = TOKEN_DTYPES[dtype].itemsize
    file.write(_HEADER.pack(MAGIC, 1, _CODES[dtype], count, count + 1))
    for block in _length_blocks(lengths):
        file.write(block.astype("<i4").tobytes())
    offset = 0
    for block in _length_blocks(lengths):
        ends = offset + np.cumsum(block.astype(np.int64) * item)
        file.write(np.concatenate([np.array([offset]), ends[:-1]]).astype("<i8").tobytes())
        offset = int(ends[-1])
    for start in range(0, count + 1, _BLOCK):
        file.write(np.arange(start, min(start + _BLOCK, count + 1), dtype="<i8").tobytes())


def index_bytes(num_documents: int) -> int:
    """Size of the `.idx` of that many one-sequence documents."""
    return _HEADER.size + num_documents * 12 + (num_documents + 1) * 8


def read_index(path: Path) -> Index:
    """Maps an `.idx`.

    Raises:
        DataError: not an MMIDIDX index of version 1, an unknown dtype, or a size that contradicts its counts.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise DataError(f"{path}: does not begin with MMIDIDX; expected a Megatron index")
    _, version, code, sequences, document_indices = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES or document_indices < 1:
        raise DataError(
            f"{path}: version {version}, dtype code {code}, {document_indices} document indices; "
            f"expected version 1, a code of {sorted(_DTYPES)} and at least one index"
        )
    lengths_end = _HEADER.size + sequences * 4
    pointers_end = lengths_end + sequences * 8
    expected = pointers_end + document_indices * 8
    # Multimodal indexes carry one more byte per sequence (its mode).
    if size not in (expected, expected + sequences):
        raise DataError(f"{path}: {size} bytes, but its counts need {expected}; the index is cut or damaged")
    raw = np.memmap(path, mode="r")
    return Index(
        dtype=_DTYPES[code],
        lengths=np.frombuffer(raw, "<i4", sequences, _HEADER.size),
        pointers=np.frombuffer(raw, "<i8", sequences, lengths_end),
        documents=np.frombuffer(raw, "<i8", document_indices, pointers_end),
    )
