"""Pieces of a corpus: whole records that one worker reads at a time."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from data_prep.sources import tables
from data_prep.sources.files import InputFile
from data_prep.sources.lines import read_records, seek_record
from data_prep.sources.records import Outcome, Place, Reading, Rejected
from data_prep.sources.whole_files import read_file

_END = 1 << 62


class Piece(Protocol):
    """Records for one worker; `input_bytes` is its share of the input, for the progress display."""

    @property
    def input_bytes(self) -> int: ...

    def outcomes(self, reading: Reading) -> Iterator[Outcome]: ...


@dataclass(frozen=True)
class FilesPiece:
    """Small text files, a document each."""

    files: tuple[InputFile, ...]

    @property
    def input_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def outcomes(self, reading: Reading) -> Iterator[Outcome]:
        for file in self.files:
            yield read_file(file)


@dataclass(frozen=True)
class RangePiece:
    """The records of a plain file that begin in the byte range [start, end)."""

    file: InputFile
    start: int
    end: int

    @property
    def input_bytes(self) -> int:
        return self.end - self.start

    def outcomes(self, reading: Reading) -> Iterator[Outcome]:
        by_block = self.file.kind == "text" and reading.text_unit == "block"
        try:
            with self.file.path.open("rb") as stream:
                if seek_record(stream, self.start, self.end, by_block):
                    yield from read_records(
                        stream, self.file.name, self.file.kind, 1, self.end, reading, lambda: self.file.path.open("rb")
                    )
        except OSError as error:
            yield Rejected("unreadable", Place(self.file.name, offset=self.start), error.strerror or "")


@dataclass(frozen=True)
class BytesPiece:
    """Whole lines or blocks taken from a compressed stream; long ones lie in a temporary file."""

    file: InputFile
    first_line: int
    data: bytes | Path
    input_bytes: int

    def _open(self) -> BinaryIO:
        return io.BytesIO(self.data) if isinstance(self.data, bytes) else self.data.open("rb")

    def outcomes(self, reading: Reading) -> Iterator[Outcome]:
        name, kind = self.file.name, self.file.kind
        with self._open() as stream:
            for outcome in read_records(stream, name, kind, self.first_line, _END, reading, self._open):
                yield replace(outcome, place=replace(outcome.place, offset=None))
        if isinstance(self.data, Path):
            self.data.unlink(missing_ok=True)


@dataclass(frozen=True)
class RowGroupPiece:
    """One row group of a parquet file."""

    file: InputFile
    group: int
    first_row: int
    input_bytes: int

    def outcomes(self, reading: Reading) -> Iterator[Outcome]:
        yield from tables.read_parquet(self.file, self.group, self.first_row, reading)


@dataclass(frozen=True)
class OutcomesPiece:
    """Records that the main process had to parse itself."""

    records: tuple[Outcome, ...]
    input_bytes: int

    def outcomes(self, reading: Reading) -> Iterator[Outcome]:
        yield from self.records
