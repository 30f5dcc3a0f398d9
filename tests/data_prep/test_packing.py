from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import packing
from data_prep.megatron import MAGIC
from data_prep.packing import Documents
from data_prep.reader import open_split
from tests.support.datasets import write_dataset


@given(data=st.data(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), shards=st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_each_token_has_its_document(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, lengths: list[int], shards: int
) -> None:
    folder = tmp_path_factory.mktemp("documents")
    tokens = np.arange(sum(lengths))
    write_dataset(folder, {"train": [tokens] * shards}, document_lengths=lengths)
    expected = np.repeat(np.arange(len(lengths) * shards), lengths * shards)
    length = data.draw(st.integers(1, len(expected)))
    starts = np.array(data.draw(st.lists(st.integers(0, len(expected) - length), max_size=4)), dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_OPEN_INDEXES", 1)
        found = Documents(open_split(folder, "train")).document_ids(starts, length)
    assert found.tolist() == [expected[start : start + length].tolist() for start in starts]


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """As in pairs made elsewhere: sequences of 2, 0, 3, 1 and 2 tokens make documents of 2, 0, 2 and 1 of them."""
    write_dataset(tmp_path, {"train": [np.arange(8)]})
    lengths = np.array([2, 0, 3, 1, 2], dtype="<i4")
    pointers = np.array([0, 2, 2, 5, 6], dtype="<i8") * 2
    documents = np.array([0, 2, 2, 4, 5], dtype="<i8")
    header = MAGIC + np.array([1], "<u8").tobytes() + b"\x08" + np.array([5, 5], "<u8").tobytes()
    content = b"".join(array.tobytes() for array in (lengths, pointers, documents))
    (tmp_path / "corpus-train-00000.idx").write_bytes(header + content)
    assert Documents(open_split(tmp_path, "train")).document_ids(np.array([0]), 8).tolist() == [
        [0, 0, 2, 2, 2, 2, 3, 3]
    ]
