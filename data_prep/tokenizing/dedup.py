"""Exact deduplication: of documents with the same text the first in corpus order stays.

A first pass hashes every document (128 bits) into one sorted file per shard. The files are then merged by ranges of
the hash, so that memory is bounded by `_MERGED_ROWS` rows whatever the corpus, and the later ones of equal
documents are written down per shard. The second pass leaves those out.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.durable import atomic_file, write_atomic
from data_prep.tokenizing.worker import PieceHashes

# A document's place: piece number in the high half, position in the piece in the low half.
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<u8")])
_MERGED_ROWS = 1 << 22


def hashes_path(folder: Path) -> Path:
    """The shard's sorted hashes."""
    return folder / "hashes.bin"


def duplicates_path(folder: Path) -> Path:
    """Places of the shard's documents to leave out, sorted."""
    return folder / "duplicates.bin"


def write_hashes(folder: Path, pieces: Iterable[PieceHashes]) -> None:
    """Stores the hashes of a shard's pieces, given in order."""
    blocks = []
    for number, piece in enumerate(pieces):
        rows = np.empty(len(piece.keys), dtype=_ROW)
        words = np.frombuffer(piece.hashes, dtype="<u8").reshape(-1, 2)
        rows["high"], rows["low"] = words[:, 0], words[:, 1]
        rows["place"] = (np.uint64(number) << np.uint64(32)) | np.array(piece.keys, dtype=np.uint64)
        blocks.append(rows)
    table = np.concatenate(blocks) if blocks else np.empty(0, dtype=_ROW)
    table.sort(order=["high", "low", "place"])
    with atomic_file(hashes_path(folder)) as file:
        file.write(table.tobytes())


def _table(folder: Path) -> NDArray[np.void]:
    path = hashes_path(folder)
    if not path.stat().st_size:
        return np.empty(0, dtype=_ROW)
    return np.memmap(path, dtype=_ROW, mode="r")


def find_duplicates(folders: list[Path]) -> None:
    """Merges the shards' hashes and writes each shard's duplicates; `folders` in corpus order."""
    tables = [_table(folder) for folder in folders]
    ranges = max(1, -(-sum(map(len, tables)) // _MERGED_ROWS))
    bounds = [(1 << 64) * number // ranges for number in range(1, ranges)]
    found: list[list[NDArray[np.uint64]]] = [[] for _ in folders]
    edges = [
        [0, *np.searchsorted(table["high"], np.array(bounds, dtype=np.uint64)).tolist(), len(table)] for table in tables
    ]
    for number in range(ranges):
        parts = [table[edge[number] : edge[number + 1]] for table, edge in zip(tables, edges, strict=True)]
        rows = np.concatenate(parts)
        shard = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        order = np.lexsort((rows["place"], shard, rows["low"], rows["high"]))
        rows, shard = rows[order], shard[order]
        again = np.zeros(len(rows), dtype=bool)
        again[1:] = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
        for index in np.unique(shard[again]):
            found[index].append(rows["place"][again & (shard == index)])
    for folder, places in zip(folders, found, strict=True):
        content = np.sort(np.concatenate(places)).tobytes() if places else b""
        write_atomic(duplicates_path(folder), content)


class Duplicates:
    """The duplicates of one shard, by piece."""

    def __init__(self, folder: Path) -> None:
        self._places = np.fromfile(duplicates_path(folder), dtype="<u8")
        self._pieces = self._places >> np.uint64(32)

    def of_piece(self, number: int) -> frozenset[int]:
        """Positions in the piece to leave out."""
        low, high = np.searchsorted(self._pieces, np.array([number, number + 1], dtype=np.uint64))
        return frozenset((self._places[low:high] & np.uint64(0xFFFFFFFF)).tolist())
