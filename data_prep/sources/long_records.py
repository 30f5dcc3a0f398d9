"""Documents too long to hold: checked in one pass over their file, then read again when they are encoded."""

from __future__ import annotations

import codecs
import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import BinaryIO

from data_prep.sources.records import READ_BYTES, LargeRecord, Outcome, Place, Reading, Rejected, fault, from_fields

Opener = Callable[[], BinaryIO]

_HELD_STRING_BYTES = 1 << 16  # a longer JSON string is left where it is
_TO_QUOTE = re.compile(rb'[^"]*')
# Within a string: everything up to its closing quote, a lone last backslash left for the next block.
_IN_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
# Whole characters of an escaped string; a high surrogate only with what follows it.
_ESCAPED = re.compile(
    r"(?:[^\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\])|(?=\\[^u])))*"
)


def check_long(parts: Callable[[], Iterator[str]], place: Place) -> Outcome:
    """The document whose text `parts()` yields, unless it is blank, holds NUL, or is not text."""
    blank = True
    position = 0
    rejected: Rejected | None = None  # for a character; what cannot be decoded at all is told before it
    try:
        for text in parts():
            if rejected is None and (found := fault(text)) is not None:
                rejected = Rejected(found[0], place, f"character {position + found[1]}")
            blank = blank and (not text or text.isspace())
            position += len(text)
    except UnicodeDecodeError:
        return Rejected("invalid_utf8", place, f"after character {position}")
    except ValueError as error:
        return Rejected("invalid_json", place, " ".join(str(error).split())[:200])
    if blank:
        return Rejected("empty", place)
    return rejected or LargeRecord(parts, place)


def _blocks(reopen: Opener, start: int, end: int) -> Iterator[bytes]:
    with reopen() as stream:
        stream.seek(start)
        while start < end and (block := stream.read(min(READ_BYTES, end - start))):
            yield block
            start += len(block)


def _decoded(reopen: Opener, start: int, end: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in _blocks(reopen, start, end):
        yield decoder.decode(block)
    decoder.decode(b"", final=True)


def long_text(reopen: Opener, start: int, end: int, place: Place) -> Outcome:
    """A line or block of text: the bytes [start, end) without the line break at their end."""
    with reopen() as stream:
        stream.seek(max(start, end - 2))
        last = stream.read(min(2, end - start))
    end -= 2 if last == b"\r\n" else last.endswith(b"\n")
    return check_long(lambda: _decoded(reopen, start, end), place)


def _unescaped(reopen: Opener, start: int, end: int) -> Iterator[str]:
    """The text of a JSON string whose quotes lie around [start, end)."""
    held = ""
    for text in _decoded(reopen, start, end):
        held += text
        whole = _ESCAPED.match(held)
        cut = whole.end() if whole else 0
        yield json.loads(f'"{held[:cut]}"')
        held = held[cut:]
        if len(held) > 12:  # longer than any escape that could be cut: let the parser say what is wrong
            break
    yield json.loads(f'"{held}"')


class _Outline:
    """A JSON text with a mark in place of each long string, and where those strings lie."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.strings: dict[str, tuple[int, int]] = {}
        self._position = 0
        self._opened: int | None = None  # where the string that is being read begins
        self._held = bytearray()

    def add(self, block: bytes) -> None:
        """The next bytes, which must not end with a lone backslash inside a string."""
        at = 0
        while at < len(block):
            found = (_TO_QUOTE if self._opened is None else _IN_STRING).match(block, at)
            end = found.end() if found else at
            if self._opened is None:
                self.text += block[at : end + 1]
                self._opened = self._position + end + 1 if end < len(block) else None
            else:
                if len(self._held) <= _HELD_STRING_BYTES:
                    self._held += block[at:end]
                if end < len(block):
                    self._close(self._position + end)
            at = end + 1
        self._position += len(block)

    def _close(self, end: int) -> None:
        assert self._opened is not None
        if end - self._opened > _HELD_STRING_BYTES:
            mark = uuid.uuid4().hex  # not in the text already, and never stored
            self.strings[mark] = (self._opened, end)
            self._held = bytearray(mark, "ascii")
        self.text += self._held + b'"'
        self._held.clear()
        self._opened = None


def long_json_line(reopen: Opener, start: int, end: int, place: Place, reading: Reading) -> Outcome:
    """The document in the JSON object at bytes [start, end); all but its long strings must fit in memory."""
    outline = _Outline()
    rest = b""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in _blocks(reopen, start, end):
        try:
            decoder.decode(block)
        except UnicodeDecodeError:
            return Rejected("invalid_utf8", place)
        block = rest + block
        # An odd number of backslashes at the end begins an escape that the next block completes.
        slashes = len(block) - len(block.rstrip(b"\\"))
        rest = block[len(block) - slashes % 2 :] if slashes % 2 else b""
        outline.add(block[: len(block) - len(rest)])
        if len(outline.text) > reading.max_record_bytes:
            detail = f"above {reading.max_record_bytes} bytes beside its long strings"
            return Rejected("record_too_large", place, detail)
    outline.add(rest)
    try:
        decoder.decode(b"", final=True)
        text = outline.text.decode("utf-8")
        value = json.loads(text if start else text.removeprefix("\ufeff"))
    except UnicodeDecodeError:
        return Rejected("invalid_utf8", place)
    except (ValueError, RecursionError) as error:
        return Rejected("invalid_json", place, " ".join(str(error).split()))
    outcome = from_fields(value, place, reading)
    mark = value.get(reading.text_field) if isinstance(value, dict) else None
    if isinstance(outcome, Rejected) or mark not in outline.strings:
        return outcome
    low, high = (start + offset for offset in outline.strings[mark])
    return check_long(lambda: _unescaped(reopen, low, high), outcome.place)
