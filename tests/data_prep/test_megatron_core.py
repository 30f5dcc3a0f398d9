"""Byte-for-byte agreement with megatron-core's own reader and writer."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.megatron import dtype_for_vocab, read_index, write_index
from tests.support.megatron_core import indexed_dataset

megatron_core = indexed_dataset()


@pytest.mark.parametrize("vocab_size", [256, 65_499, 65_500, 65_535, 65_536, 65_537, 200_019])
def test_our_files_are_those_of_megatrons_writer(tmp_path: Path, vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    lengths = generator.integers(1, 50, 200).astype(np.int32)
    documents = [generator.integers(0, vocab_size, length) for length in lengths]
    documents[0][0] = vocab_size - 1
    dtype = dtype_for_vocab(vocab_size)
    assert np.dtype(dtype) == megatron_core.DType.optimal_dtype(vocab_size)

    builder = megatron_core.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    for document in documents:
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))

    (tmp_path / "ours.bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    with (tmp_path / "ours.idx").open("wb") as file:
        write_index(file, dtype, lengths)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()

    theirs = megatron_core.IndexedDataset(str(tmp_path / "ours"))
    assert len(theirs) == len(documents)
    for number in (0, 1, 199):
        assert np.array_equal(theirs[number], documents[number])
    ours = read_index(tmp_path / "theirs.idx")
    assert np.array_equal(ours.lengths, lengths)
    assert np.array_equal(ours.documents, theirs.document_indices)


def test_an_index_written_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.arange(1, 1000, dtype=np.int32)
    whole, parts = io.BytesIO(), io.BytesIO()
    write_index(whole, "uint16", lengths)
    monkeypatch.setattr("data_prep.megatron._BLOCK", 7)
    write_index(parts, "uint16", lengths)
    assert parts.getvalue() == whole.getvalue()


def test_offsets_beyond_four_gibibytes_are_read_by_megatron(tmp_path: Path) -> None:
    """Two documents whose sum passes 4 GiB, in a sparse file."""
    lengths = np.array([2**30 + 5, 3], dtype=np.int32)
    with (tmp_path / "big.idx").open("wb") as file:
        write_index(file, "int32", lengths)
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * 4)
        file.seek(-12, 2)
        file.write(np.array([7, 8, 9], dtype="<i4").tobytes())
    dataset = megatron_core.IndexedDataset(str(tmp_path / "big"))  # its documents are views that die with it
    assert dataset[1].tolist() == [7, 8, 9]
