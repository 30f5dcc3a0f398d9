from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.tokenizing import dedup
from data_prep.tokenizing.dedup import Duplicates, find_duplicates, write_hashes
from data_prep.tokenizing.worker import PieceHashes

# Few values, equal ones in either half, and both ends of the range.
WORDS = st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1])
PIECES = st.lists(st.lists(st.tuples(WORDS, WORDS), max_size=8), max_size=4)


def piece_of(hashes: list[tuple[int, int]]) -> PieceHashes:
    keys = np.arange(len(hashes), dtype="<u4") * 3 + 1  # a piece's places have gaps
    return PieceHashes(np.array(hashes, dtype="<u8").tobytes(), keys.tobytes())


@given(shards=st.lists(PIECES, min_size=1, max_size=4), run=st.integers(1, 9), merged=st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_all_but_the_first_of_equal_documents(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[list[tuple[int, int]]]], run: int, merged: int
) -> None:
    root = tmp_path_factory.mktemp("shards")
    folders = [root / str(number) for number in range(len(shards))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "_RUN_ROWS", run)
        patch.setattr(dedup, "_MERGED_ROWS", merged)
        for folder, pieces in zip(folders, shards, strict=True):
            folder.mkdir()
            write_hashes(folder, map(piece_of, pieces))
        find_duplicates(folders)
        find_duplicates(folders)  # as after a stop in between
    seen: set[tuple[int, int]] = set()
    for folder, pieces in zip(folders, shards, strict=True):
        duplicates = Duplicates(folder)
        for number, hashes in enumerate(pieces):
            expected = set()
            for index, value in enumerate(hashes):
                if value in seen:
                    expected.add(index * 3 + 1)
                seen.add(value)
            assert duplicates.of_piece(number) == expected


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400,000 documents, half of them the same text: at once their rows would be 9.6 MB before any sorting."""
    monkeypatch.setattr(dedup, "_RUN_ROWS", 4096)
    monkeypatch.setattr(dedup, "_MERGED_ROWS", 4096)
    generator = np.random.default_rng(0)

    def pieces() -> list[PieceHashes]:
        made = []
        for _ in range(25):
            hashes = generator.integers(0, 2**63, (2000, 2), dtype=np.uint64)
            hashes[::2] = 7
            made.append(PieceHashes(hashes.tobytes(), np.arange(2000, dtype="<u4").tobytes()))
        return made

    folders = [tmp_path / str(number) for number in range(8)]
    tracemalloc.start()
    for folder in folders:
        folder.mkdir()
        shard = iter(pieces())
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        write_hashes(folder, shard)
        assert tracemalloc.get_traced_memory()[1] - before < 2_000_000
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    find_duplicates(folders)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 2_000_000
    assert sum(len(np.fromfile(folder / "duplicates.bin", "<u8")) for folder in folders) == 200_000 - 1
