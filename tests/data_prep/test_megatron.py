from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import DataError
from data_prep.megatron import dtype_for_vocab, index_bytes, read_index, write_index


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(256, "uint16"), (65_499, "uint16"), (65_500, "int32"), (65_536, "int32"), (65_537, "int32")],
)
def test_dtype_follows_megatrons_rule(vocab: int, dtype: str) -> None:
    assert dtype_for_vocab(vocab) == dtype


def test_index_bytes_are_those_of_the_format() -> None:
    file = io.BytesIO()
    write_index(file, "uint16", np.array([3, 1, 4], dtype=np.int32))
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 4)
        + struct.pack("<3i", 3, 1, 4)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert file.getvalue() == expected
    assert index_bytes(3) == len(expected)


def test_pointers_pass_four_gibibytes(tmp_path: Path) -> None:
    path = tmp_path / "big.idx"
    lengths = np.full(3, 2**31 - 1, dtype=np.int32)
    with path.open("wb") as file:
        write_index(file, "int32", lengths)
    assert read_index(path).pointers.tolist() == [0, 4 * (2**31 - 1), 8 * (2**31 - 1)]


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_index_reads_back(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.idx"
    lengths = np.arange(count, dtype=np.int32)
    with path.open("wb") as file:
        write_index(file, "int32", lengths)
    index = read_index(path)
    assert index.dtype == np.dtype("<i4")
    assert np.array_equal(index.lengths, lengths)
    assert np.array_equal(index.pointers, np.cumsum(lengths) * 4 - lengths * 4)
    assert np.array_equal(index.documents, np.arange(count + 1))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"X" + raw[1:], lambda raw: raw[:20]])
def test_a_damaged_index_is_named(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "a.idx"
    file = io.BytesIO()
    write_index(file, "uint16", np.array([5, 6], dtype=np.int32))
    assert callable(damage)
    path.write_bytes(damage(file.getvalue()))
    with pytest.raises(DataError, match=r"a\.idx"):
        read_index(path)
