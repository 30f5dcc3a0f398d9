"""A corpus as an ordered run of pieces, cut the same way whatever the number of workers and machines.

A piece holds whole records and is one worker's task (`sources.pieces`). A span is a run of pieces and becomes one
shard; spans are known from the file sizes alone, so every process can compute all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.sources import tables
from data_prep.sources.files import InputFile
from data_prep.sources.json_values import read_json
from data_prep.sources.pieces import FilesPiece, OutcomesPiece, Piece, RangePiece, RowGroupPiece
from data_prep.sources.records import Outcome, Reading, Record
from data_prep.sources.streams import stream_pieces

PIECE_BYTES = 1 << 21
SHARD_BYTES = 1 << 28
_SHARD_ROWS = 1 << 16  # of a table, whose size in bytes is not known
_FILES_PER_PIECE = 1024


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
            yield from stream_pieces(file, self.reading, self.piece_bytes, spill)
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
