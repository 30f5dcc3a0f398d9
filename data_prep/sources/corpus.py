"""A corpus as an ordered run of pieces, cut the same way whatever the number of workers and machines.

A piece holds whole records and is one worker's task. A span is a run of pieces and becomes one shard; spans are
known from the file sizes alone, so every process can compute all of them.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from data_prep.sources import tables
from data_prep.sources.archives import open_input
from data_prep.sources.files import InputFile
from data_prep.sources.json_values import read_json
from data_prep.sources.records import (
    READ_BYTES,
    Outcome,
    Place,
    Reading,
    Record,
    Rejected,
    is_blank,
    read_records,
    seek_record,
)
from data_prep.sources.whole_files import read_file

PIECE_BYTES = 1 << 21
SHARD_BYTES = 1 << 28
_SHARD_ROWS = 1 << 16  # of a table, whose size in bytes is not known
_FILES_PER_PIECE = 1024
_INLINE_BYTES = 1 << 24  # a longer piece travels to its worker as a file
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
                    yield from read_records(stream, self.file.name, self.file.kind, 1, self.end, reading)
        except OSError as error:
            yield Rejected("unreadable", Place(self.file.name, offset=self.start), error.strerror or "")


@dataclass(frozen=True)
class BytesPiece:
    """Whole lines or blocks taken from a compressed stream; long ones lie in a temporary file."""

    file: InputFile
    first_line: int
    data: bytes | Path
    input_bytes: int

    def outcomes(self, reading: Reading) -> Iterator[Outcome]:
        stream = io.BytesIO(self.data) if isinstance(self.data, bytes) else self.data.open("rb")
        with stream:
            for outcome in read_records(stream, self.file.name, self.file.kind, self.first_line, _END, reading):
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


@dataclass(frozen=True)
class Span:
    """Pieces from (file, offset) up to (file, offset), the end left out; offsets in bytes, or rows of a table."""

    first_file: int
    first_offset: int
    end_file: int
    end_offset: int


@dataclass(frozen=True)
class TableSource:
    """Arguments of `tables.open_table`."""

    name: str
    config: str | None
    split: str
    streaming: bool


@dataclass(frozen=True)
class Corpus:
    """Input files in order, and how records are found in them; or one table."""

    files: tuple[InputFile, ...]
    reading: Reading
    table_source: TableSource | None = None
    piece_bytes: int = PIECE_BYTES
    shard_bytes: int = SHARD_BYTES

    @cached_property
    def _table(self) -> Any:
        source = self.table_source
        assert source is not None
        return tables.open_table(source.name, source.config, source.split, source.streaming)

    def with_table(self) -> Corpus:
        """The corpus whose only input is its table, opened to learn its length (0 when streamed)."""
        source = self.table_source
        assert source is not None
        rows = len(self._table) if hasattr(self._table, "__len__") else 0
        name = ":".join(part for part in (source.name, source.config, source.split) if part)
        return replace(self, files=(InputFile(Path(source.name), name, rows, "table", ""),))

    def _is_splittable(self, file: InputFile) -> bool:
        if file.kind == "table":
            return file.size > 0
        by_line = file.kind == "jsonl" or (file.kind == "text" and self.reading.text_unit != "file")
        return by_line and not file.compression

    def spans(self) -> list[Span]:
        """The shards' parts of the corpus, in order, each of about `shard_bytes` of input."""
        spans: list[Span] = []
        first = (0, 0)
        held = 0

        def close(file: int, offset: int) -> None:
            nonlocal first, held
            spans.append(Span(*first, file, offset))
            first, held = (file, offset), 0

        for number, file in enumerate(self.files):
            if self._is_splittable(file):
                limit = _SHARD_ROWS if file.kind == "table" else self.shard_bytes
                offset = 0
                while held + file.size - offset > limit:
                    offset += limit - held
                    close(number, offset)
                held += file.size - offset
            else:
                held += file.size
            if held >= self.shard_bytes:
                close(number + 1, 0)
        if first < (len(self.files), 0):
            close(len(self.files), 0)
        return spans

    def input_bytes(self, span: Span) -> int:
        """Size of a span's input."""
        last = self.files[span.first_file : span.end_file]
        return sum(file.size for file in last) - span.first_offset + span.end_offset

    def pieces(self, span: Span, spill: Path) -> Iterator[Piece]:
        """The pieces of a span in order; long pieces of compressed files are put into `spill`."""
        group: list[InputFile] = []
        held = 0
        for number in range(span.first_file, min(span.end_file + 1, len(self.files))):
            file = self.files[number]
            start = span.first_offset if number == span.first_file else 0
            end = span.end_offset if number == span.end_file else file.size
            if number == span.end_file and span.end_offset == 0:
                break
            if file.kind == "text" and self.reading.text_unit == "file":
                if group and (held + file.size > self.piece_bytes or len(group) == _FILES_PER_PIECE):
                    yield FilesPiece(tuple(group))
                    group, held = [], 0
                group.append(file)
                held += file.size
                continue
            if group:
                yield FilesPiece(tuple(group))
                group, held = [], 0
            yield from self._file_pieces(file, start, end, spill)
        if group:
            yield FilesPiece(tuple(group))

    def _file_pieces(self, file: InputFile, start: int, end: int, spill: Path) -> Iterator[Piece]:
        if file.kind == "table":
            records = tables.read_table(self._table, file.name, start, end if file.size else None, self.reading)
            yield from self._grouped(records, file)
        elif file.kind == "parquet":
            groups = tables.row_groups(file)
            row = 0
            for group, rows in enumerate(groups):
                yield RowGroupPiece(file, group, row, file.size // len(groups))
                row += rows
        elif file.kind == "json":
            yield from self._grouped(read_json(file, self.reading), file)
        elif file.compression:
            yield from self._stream_pieces(file, spill)
        else:
            for offset in range(start, end, self.piece_bytes):
                yield RangePiece(file, offset, min(offset + self.piece_bytes, end))

    def _grouped(self, outcomes: Iterator[Outcome], file: InputFile) -> Iterator[Piece]:
        """Packs parsed records into pieces; the file's size is counted with them as they come."""
        is_table = file.kind == "table"
        group: list[Outcome] = []
        held = counted = 0
        for outcome in outcomes:
            if isinstance(outcome, Record):
                outcome = replace(outcome, fields=outcome.fields if self.reading.keep_fields else None)
                held += len(outcome.text)
            group.append(outcome)
            if held >= self.piece_bytes or len(group) >= _FILES_PER_PIECE:
                share = len(group) if is_table else min(held, file.size - counted)
                counted += share
                yield OutcomesPiece(tuple(group), share)
                group, held = [], 0
        if group:
            yield OutcomesPiece(tuple(group), len(group) if is_table else file.size - counted)

    def _stream_pieces(self, file: InputFile, spill: Path) -> Iterator[Piece]:
        stream, watch = open_input(file)
        assert watch is not None
        by_block = file.kind == "text" and self.reading.text_unit == "block"
        line, counted = 1, 0
        with stream:
            while data := stream.read(self.piece_bytes):
                data += self._rest_of_record(stream, data, by_block)
                lost = Rejected(watch.damage, Place(file.name), "") if watch.damage else None
                if lost is not None:  # the last line was cut with the archive: it is not a record
                    data = data[: data.rfind(b"\n") + 1]
                share = watch.consumed - counted
                counted += share
                if data:
                    yield BytesPiece(file, line, _inline_or_spilled(data, spill), share)
                    line += data.count(b"\n") + (not data.endswith(b"\n"))
                if lost is not None:
                    break
            if watch.damage is not None:
                place = Place(file.name, line=line)
                yield OutcomesPiece((Rejected(watch.damage, place, "lines from here on are lost"),), 0)

    def _rest_of_record(self, stream: io.BufferedReader, data: bytes, by_block: bool) -> bytes:
        """What is missing from `data` to end at the end of a line, or of a block."""
        limit = self.reading.max_record_bytes
        rest = b"" if data.endswith(b"\n") else stream.readline(limit + 1)
        if len(rest) > limit:  # reported as too large by the worker; its end is of no use
            while (part := stream.readline(READ_BYTES)) and not part.endswith(b"\n"):
                pass
            rest += b"\n"
        parts, held = [rest], len(rest)
        while by_block:
            line = stream.readline(READ_BYTES)
            if held <= limit or is_blank(line):
                parts.append(line)
                held += len(line)
            if not line or is_blank(line):
                break
        return b"".join(parts)


def _inline_or_spilled(data: bytes, spill: Path) -> bytes | Path:
    if len(data) <= _INLINE_BYTES:
        return data
    with tempfile.NamedTemporaryFile(dir=spill, delete=False) as file:
        file.write(data)
    return Path(file.name)
