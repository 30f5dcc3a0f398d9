"""Records in streams of lines and blocks, and where they begin in any part of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from data_prep.sources.long_records import Opener, long_json_line, long_text
from data_prep.sources.records import (
    READ_BYTES,
    Outcome,
    Place,
    Reading,
    Rejected,
    checked,
    decoded,
    from_json_line,
)


def _without_break(line: bytes) -> bytes:
    return line.removesuffix(b"\r\n" if line.endswith(b"\r\n") else b"\n")


def _skip_line(stream: BinaryIO) -> None:
    while (part := stream.readline(READ_BYTES)) and not part.endswith(b"\n"):
        pass


class _Line(NamedTuple):
    data: bytes  # with its break; cut to limit + 1 bytes where it is longer than the limit
    place: Place
    start: int
    end: int


def _read_lines(stream: BinaryIO, file: str, first_line: int, end: int, limit: int) -> Iterator[_Line]:
    """Lines that begin before offset `end`."""
    number = first_line
    while (offset := stream.tell()) < end:
        line = stream.readline(limit + 1)
        if not line:
            return
        if len(line) > limit and not line.endswith(b"\n"):
            _skip_line(stream)
        yield _Line(line, Place(file, line=number, offset=offset), offset, stream.tell())
        number += 1


def _outcome_of_line(line: _Line, kind: str, reading: Reading, reopen: Opener) -> Outcome:
    if len(line.data) > reading.max_record_bytes:
        if kind == "jsonl":
            return long_json_line(reopen, line.start, line.end, line.place, reading)
        return long_text(reopen, line.start, line.end, line.place)
    if kind == "jsonl":
        return from_json_line(line.data, line.place, reading)
    text = decoded(_without_break(line.data), line.place)
    return text if isinstance(text, Rejected) else checked(text, line.place)


def _outcome_of_block(lines: list[_Line], end: int, reading: Reading, reopen: Opener) -> Outcome:
    first = lines[0]
    if end - first.start > reading.max_record_bytes:
        return long_text(reopen, first.start, end, first.place)
    text = decoded(_without_break(b"".join(line.data for line in lines)), first.place)
    return text if isinstance(text, Rejected) else checked(text, first.place)


def is_blank(line: bytes) -> bool:
    """Whether a line separates blocks."""
    return line in (b"\n", b"\r\n")


def _read_blocks(
    stream: BinaryIO, file: str, first_line: int, end: int, reading: Reading, reopen: Opener
) -> Iterator[Outcome]:
    """Runs of non-blank lines whose first line begins before `end`; the stream stands at a block's edge."""
    lines: list[_Line] = []
    block_end = 0
    # A block that has begun is read to its own end, past `end`.
    for line in _read_lines(stream, file, first_line, 1 << 62, reading.max_record_bytes):
        if is_blank(line.data):
            if lines:
                yield _outcome_of_block(lines, block_end, reading, reopen)
            lines = []
        if not lines and line.start >= end:
            return
        if is_blank(line.data):
            continue
        block_end = line.end
        if not lines or block_end - lines[0].start <= reading.max_record_bytes:
            lines.append(line)
    if lines:
        yield _outcome_of_block(lines, block_end, reading, reopen)


def read_records(
    stream: BinaryIO, file: str, kind: str, first_line: int, end: int, reading: Reading, reopen: Opener
) -> Iterator[Outcome]:
    """Documents of a stream of lines or blocks that stands at the beginning of one; `reopen` opens it anew."""
    if kind == "text" and reading.text_unit == "block":
        yield from _read_blocks(stream, file, first_line, end, reading, reopen)
        return
    for line in _read_lines(stream, file, first_line, end, reading.max_record_bytes):
        yield _outcome_of_line(line, kind, reading, reopen)


def seek_record(stream: BinaryIO, start: int, end: int, by_block: bool) -> bool:
    """Moves to the first record that begins in [start, end); False when none does.

    Looks at no more than the range itself and the three bytes before it, however long a line is.
    """
    if start == 0:
        stream.seek(0)
        return True
    if by_block:
        stream.seek(max(0, start - 3))
        before = stream.read(start - stream.tell())
        if before.endswith((b"\n\n", b"\n\r\n")) or before in (b"\n", b"\r\n"):
            return True
        if before.endswith(b"\n\r") or before == b"\r":  # the range may begin inside a blank line's break
            stream.seek(start - 1)
            if is_blank(stream.readline(2)):
                return stream.tell() < end
    stream.seek(start - 1)
    while (position := stream.tell()) < end:
        line = stream.readline(min(READ_BYTES, end - position))
        if not line.endswith(b"\n"):
            if not line:
                return False
            continue
        following = stream.tell()
        if not by_block:
            return following < end
        if is_blank(stream.readline(2)):
            return stream.tell() < end
        stream.seek(following)
    return False
