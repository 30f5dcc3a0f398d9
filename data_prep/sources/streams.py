"""Cutting a compressed stream of lines or blocks into pieces; long ones lie in a temporary file."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data_prep.sources.archives import open_input
from data_prep.sources.files import InputFile
from data_prep.sources.lines import is_blank
from data_prep.sources.pieces import BytesPiece, OutcomesPiece, Piece
from data_prep.sources.records import READ_BYTES, Place, Reading, Rejected

_INLINE_BYTES = 1 << 24  # a longer piece travels to its worker as a file


class _Content:
    """The bytes of a piece as they come: in memory, or beyond 16 MiB in a file."""

    def __init__(self, spill: Path) -> None:
        self._spill = spill
        self._held: list[bytes] = []
        self._file: BinaryIO | None = None
        self._name = ""
        self._after_break = 0  # length up to the last line break
        self.size = 0
        self.breaks = 0

    def add(self, data: bytes) -> None:
        if (last := data.rfind(b"\n")) >= 0:
            self._after_break = self.size + last + 1
            self.breaks += data.count(b"\n")
        self.size += len(data)
        if self._file is None and self.size > _INLINE_BYTES:
            descriptor, self._name = tempfile.mkstemp(dir=self._spill)
            self._file = os.fdopen(descriptor, "r+b")
            self._file.writelines(self._held)
            self._held = []
        if self._file is None:
            self._held.append(data)
        else:
            self._file.write(data)

    @property
    def ends_with_break(self) -> bool:
        return self._after_break == self.size

    def drop_unfinished_line(self) -> None:
        self.size = self._after_break

    def result(self) -> bytes | Path:
        if self._file is None:
            return b"".join(self._held)[: self.size]
        with self._file:
            self._file.truncate(self.size)
        return Path(self._name)


def _rest_of_record(stream: io.BufferedReader, ends_with_break: bool, by_block: bool) -> Iterator[bytes]:
    """What follows up to the end of the line, or of the block."""
    while not ends_with_break and (part := stream.readline(READ_BYTES)):
        yield part
        ends_with_break = part.endswith(b"\n")
    at_line_start = True
    while by_block and (part := stream.readline(READ_BYTES)):
        yield part
        if at_line_start and is_blank(part):
            return
        at_line_start = part.endswith(b"\n")


def stream_pieces(file: InputFile, reading: Reading, piece_bytes: int, spill: Path) -> Iterator[Piece]:
    """The records of a compressed file in pieces of at least `piece_bytes`.

    Lines before the damage of a cut or corrupt archive are kept; the line that was cut is not a record.
    """
    stream, watch = open_input(file)
    assert watch is not None
    by_block = file.kind == "text" and reading.text_unit == "block"
    line, counted = 1, 0
    with stream:
        while watch.damage is None and (data := stream.read(piece_bytes)):
            content = _Content(spill)
            content.add(data)
            for part in _rest_of_record(stream, content.ends_with_break, by_block):
                content.add(part)
            if watch.damage is not None:
                content.drop_unfinished_line()
            share = watch.consumed - counted
            counted += share
            if content.size:
                unfinished = not content.ends_with_break
                yield BytesPiece(file, line, content.result(), share)
                line += content.breaks + unfinished
        if watch.damage is not None:
            place = Place(file.name, line=line)
            yield OutcomesPiece((Rejected(watch.damage, place, "lines from here on are lost"),), 0)
