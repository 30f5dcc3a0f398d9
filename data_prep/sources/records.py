"""From bytes to documents, with a stated answer to everything that can be wrong with them.

Reasons for leaving a record out: `invalid_utf8`, `invalid_json`, `not_an_object`, `missing_field`,
`not_a_string`, `lone_surrogate`, `nul_byte`, `empty` (nothing but white space), `blank_line` (JSON lines),
`record_too_large`, `truncated_archive`, `corrupt_archive`, `unreadable`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Reading:
    """How records are found in files."""

    text_unit: str = "file"  # a .txt document is a "file", a "line" or a "block" between blank lines
    text_field: str = "text"
    id_field: str | None = None
    max_record_bytes: int = 1 << 28
    keep_fields: bool = False  # whether a filter wants to see the other fields


@dataclass(frozen=True)
class Place:
    """Where a record begins: file, and line or row counted from 1, and byte offset where there is one."""

    file: str
    line: int | None = None
    row: int | None = None
    offset: int | None = None
    id: str | None = None


@dataclass(frozen=True)
class Record:
    """A document. `fields` holds a JSON record's or a row's other fields, for the user's filter."""

    text: str
    place: Place
    fields: dict[str, Any] | None = None


@dataclass(frozen=True)
class LargeRecord:
    """A document too large to hold: `chunks()` opens it anew and yields its text in order."""

    chunks: Callable[[], Iterator[str]]
    place: Place


@dataclass(frozen=True)
class Rejected:
    """A record left out, or `count` neighbouring ones left out for the same reason."""

    reason: str
    place: Place
    detail: str = ""
    count: int = 1


Outcome = Record | LargeRecord | Rejected


def checked(text: str, place: Place, fields: dict[str, Any] | None = None) -> Outcome:
    """The record, unless its text is empty, holds NUL, or is not encodable."""
    if not text or text.isspace():
        return Rejected("empty", place)
    if "\0" in text:
        return Rejected("nul_byte", place, f"character {text.index(chr(0))}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return Rejected("lone_surrogate", place, f"character {error.start}")
    return Record(text, place, fields)


def decoded(data: bytes, place: Place) -> str | Rejected:
    """UTF-8 text of a record's bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return Rejected("invalid_utf8", place, f"byte {error.start} of the record")


def from_fields(value: Any, place: Place, reading: Reading) -> Outcome:
    """A document from a parsed JSON value or a table's row."""
    if not isinstance(value, dict):
        return Rejected("not_an_object", place, type(value).__name__)
    identity = value.get(reading.id_field) if reading.id_field else None
    if identity is not None:
        place = replace(place, id=str(identity))
    if reading.text_field not in value:
        return Rejected("missing_field", place, reading.text_field)
    text = value[reading.text_field]
    if not isinstance(text, str):
        return Rejected("not_a_string", place, f"{reading.text_field} is {type(text).__name__}")
    return checked(text, place, value)


def from_json_line(line: bytes, place: Place, reading: Reading) -> Outcome:
    """A document from one line of JSON."""
    if not line.strip():
        return Rejected("blank_line", place)
    text = decoded(line, place)
    if isinstance(text, Rejected):
        return text
    if place.line == 1 and not place.offset:
        text = text.removeprefix("\ufeff")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Rejected("invalid_json", place, " ".join(str(error).split()))
    return from_fields(value, place, reading)


def _without_break(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _skip_line(stream: BinaryIO) -> None:
    while (part := stream.readline(READ_BYTES)) and not part.endswith(b"\n"):
        pass


def read_lines(stream: BinaryIO, file: str, first_line: int, end: int, limit: int) -> Iterator[tuple[bytes, Place]]:
    """Lines, with their breaks, that begin before offset `end`; a line above `limit` bytes is cut to limit + 1."""
    number = first_line
    while (offset := stream.tell()) < end:
        line = stream.readline(limit + 1)
        if not line:
            return
        if len(line) > limit and not line.endswith(b"\n"):
            _skip_line(stream)
        yield line, Place(file, line=number, offset=offset)
        number += 1


def _outcome_of_line(line: bytes, place: Place, kind: str, reading: Reading) -> Outcome:
    if len(line) > reading.max_record_bytes:
        return Rejected("record_too_large", place, f"above {reading.max_record_bytes} bytes")
    if kind == "jsonl":
        return from_json_line(line, place, reading)
    text = decoded(_without_break(line), place)
    return text if isinstance(text, Rejected) else checked(text, place)


def _outcome_of_block(lines: list[bytes], size: int, place: Place, reading: Reading) -> Outcome:
    if size > reading.max_record_bytes:
        return Rejected("record_too_large", place, f"above {reading.max_record_bytes} bytes")
    text = decoded(_without_break(b"".join(lines)), place)
    return text if isinstance(text, Rejected) else checked(text, place)


def is_blank(line: bytes) -> bool:
    """Whether a line separates blocks."""
    return line in (b"\n", b"\r\n")


def read_blocks(stream: BinaryIO, file: str, first_line: int, end: int, reading: Reading) -> Iterator[Outcome]:
    """Runs of non-blank lines whose first line begins before `end`; the stream stands at a block's edge."""
    lines: list[bytes] = []
    size = 0
    place = Place(file)
    # A block that has begun is read to its own end, past `end`.
    for line, here in read_lines(stream, file, first_line, 1 << 62, reading.max_record_bytes):
        if is_blank(line):
            if lines:
                yield _outcome_of_block(lines, size, place, reading)
            lines, size = [], 0
        if not lines and here.offset is not None and here.offset >= end:
            return
        if is_blank(line):
            continue
        if not lines:
            place = here
        size += len(line)
        if size <= reading.max_record_bytes or not lines:
            lines.append(line)
    if lines:
        yield _outcome_of_block(lines, size, place, reading)


def read_records(
    stream: BinaryIO, file: str, kind: str, first_line: int, end: int, reading: Reading
) -> Iterator[Outcome]:
    """Documents of a stream of lines or blocks that stands at the beginning of one."""
    if kind == "text" and reading.text_unit == "block":
        yield from read_blocks(stream, file, first_line, end, reading)
        return
    for line, place in read_lines(stream, file, first_line, end, reading.max_record_bytes):
        yield _outcome_of_line(line, place, kind, reading)


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
