"""From bytes to documents, with a stated answer to everything that can be wrong with them.

Reasons for leaving a record out: `invalid_utf8`, `invalid_json`, `not_an_object`, `missing_field`,
`not_a_string`, `lone_surrogate`, `nul_byte`, `empty` (nothing but white space), `blank_line` (JSON lines),
`record_too_large`, `truncated_archive`, `corrupt_archive`, `unreadable`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Reading:
    """How records are found in files."""

    text_unit: str = "file"  # a .txt document is a "file", a "line" or a "block" between blank lines
    text_field: str = "text"
    id_field: str | None = None
    max_record_bytes: int = 1 << 26  # of a line or block that is held as a whole; a longer one is streamed
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


def fault(text: str) -> tuple[str, int] | None:
    """The first character that keeps a text from being tokenized: (reason, its index)."""
    nul = text.find("\0")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if nul < 0 or error.start < nul:
                return "lone_surrogate", error.start
    return ("nul_byte", nul) if nul >= 0 else None


def checked(text: str, place: Place, fields: dict[str, Any] | None = None) -> Outcome:
    """The record, unless its text is empty, holds NUL, or is not encodable."""
    if not text or text.isspace():
        return Rejected("empty", place)
    if (found := fault(text)) is not None:
        return Rejected(found[0], place, f"character {found[1]}")
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
