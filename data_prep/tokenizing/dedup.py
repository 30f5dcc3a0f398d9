"""Exact deduplication: of documents with the same text the first in corpus order stays.

A first pass hashes every document (128 bits). Each shard stores its hashes in sorted runs of at most `_RUN_ROWS`; what
repeats within a run is known at once and leaves it. Then all runs are merged by ranges of the hash, `_MERGED_ROWS` at
a time. So memory is bounded whatever the corpus, and also where one text is repeated without end: each run holds it
once. The second pass leaves the later ones of equal documents out.

shard-00000/hashes.bin      rows of all runs
shard-00000/repeated.bin    places of documents that repeat one of their run
shard-00000/hashes.json     rows of each run; its presence says that the shard is hashed
shard-00000/duplicates.bin  places of the shard's documents to leave out, sorted
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.durable import atomic_file, write_atomic
from data_prep.tokenizing.worker import PieceHashes

# A document's place: piece number in the high half, position in the piece in the low half.
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<u8")])
_RUN_ROWS = 1 << 21  # 48 MiB
_MERGED_ROWS = 1 << 21


class _Run(NamedTuple):
    """A sorted run in a shard's `hashes.bin`."""

    shard: int
    path: Path
    first: int
    rows: int

    def read(self, start: int, end: int) -> NDArray[np.void]:
        return np.fromfile(self.path, _ROW, end - start, offset=(self.first + start) * _ROW.itemsize)


def is_hashed(folder: Path) -> bool:
    """Whether `write_hashes` has finished for the shard."""
    return (folder / "hashes.json").exists()


def _rows(number: int, piece: PieceHashes) -> NDArray[np.void]:
    rows = np.empty(len(piece.keys) // 4, dtype=_ROW)
    words = np.frombuffer(piece.hashes, dtype="<u8").reshape(-1, 2)
    rows["high"], rows["low"] = words[:, 0], words[:, 1]
    rows["place"] = (np.uint64(number) << np.uint64(32)) | np.frombuffer(piece.keys, "<u4").astype(np.uint64)
    return rows


def _blocks(pieces: Iterable[PieceHashes]) -> Iterator[NDArray[np.void]]:
    """The rows of a shard's pieces in blocks of at most `_RUN_ROWS`."""
    held: list[NDArray[np.void]] = []
    count = 0
    for number, piece in enumerate(pieces):
        rows = _rows(number, piece)
        while count + len(rows) >= _RUN_ROWS:
            taken, rows = rows[: _RUN_ROWS - count], rows[_RUN_ROWS - count :]
            yield np.concatenate([*held, taken])
            held, count = [], 0
        held.append(rows)
        count += len(rows)
    if count:
        yield np.concatenate(held)


def _sorted(rows: NDArray[np.void]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Order by hash, the given order kept among equals, and which of the ordered rows repeat the one before."""
    order = np.lexsort((rows["low"], rows["high"]))
    high, low = rows["high"][order], rows["low"][order]
    again = np.zeros(len(rows), dtype=np.bool_)
    again[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return order, again


def write_hashes(folder: Path, pieces: Iterable[PieceHashes]) -> None:
    """Stores the hashes of a shard's pieces, given in order."""
    runs = []
    with atomic_file(folder / "hashes.bin") as hashes, atomic_file(folder / "repeated.bin") as repeated:
        for rows in _blocks(pieces):
            order, again = _sorted(rows)
            hashes.write(rows[order[~again]].tobytes())
            repeated.write(rows["place"][order[again]].tobytes())
            runs.append(len(rows) - int(again.sum()))
    write_atomic(folder / "hashes.json", json.dumps({"runs": runs}).encode())


def _runs(folders: list[Path]) -> list[_Run]:
    runs = []
    for shard, folder in enumerate(folders):
        first = 0
        for rows in json.loads((folder / "hashes.json").read_bytes())["runs"]:
            runs.append(_Run(shard, folder / "hashes.bin", first, rows))
            first += rows
    return runs


def _edges(run: _Run, bounds: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where each range of the hash begins in a run, and the run's end."""
    # One map at a time: thousands of open ones would exhaust the file descriptors.
    high = np.memmap(run.path, _ROW, "r", run.first * _ROW.itemsize, (run.rows,))["high"]
    return np.array([0, *np.searchsorted(high, bounds), run.rows], dtype=np.int64)


def find_duplicates(folders: list[Path]) -> None:
    """Merges the shards' hashes and writes each shard's duplicates; `folders` in corpus order."""
    runs = _runs(folders)
    ranges = max(1, -(-sum(run.rows for run in runs) // _MERGED_ROWS))
    bounds = np.array([(1 << 64) * number // ranges for number in range(1, ranges)], dtype=np.uint64)
    edges = [_edges(run, bounds) for run in runs]
    for folder in folders:
        (folder / "across.bin").unlink(missing_ok=True)  # of a merge that was stopped
    for number in range(ranges):
        parts = [run.read(int(edge[number]), int(edge[number + 1])) for run, edge in zip(runs, edges, strict=True)]
        shard = np.repeat([run.shard for run in runs], [len(part) for part in parts])
        rows = np.concatenate(parts) if parts else np.empty(0, _ROW)
        order, again = _sorted(rows)  # the runs stand in corpus order, so the first of equals is the one to keep
        later = order[again]
        for index in np.unique(shard[later]).tolist():
            with (folders[index] / "across.bin").open("ab") as across:
                across.write(rows["place"][later[shard[later] == index]].tobytes())
    for folder in folders:
        found = [
            np.fromfile(path, "<u8") for name in ("repeated", "across") if (path := folder / f"{name}.bin").exists()
        ]
        write_atomic(folder / "duplicates.bin", np.sort(np.concatenate(found)).tobytes())


class Duplicates:
    """The duplicates of one shard, by piece."""

    def __init__(self, folder: Path) -> None:
        self._places = np.fromfile(folder / "duplicates.bin", dtype="<u8")
        self._pieces = self._places >> np.uint64(32)

    def of_piece(self, number: int) -> frozenset[int]:
        """Positions in the piece to leave out."""
        low, high = np.searchsorted(self._pieces, np.array([number, number + 1], dtype=np.uint64))
        return frozenset((self._places[low:high] & np.uint64(0xFFFFFFFF)).tolist())
