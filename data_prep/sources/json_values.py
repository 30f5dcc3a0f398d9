"""`.json` files: an array of objects, one object, or objects one after another."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator

from data_prep.sources.archives import open_input
from data_prep.sources.files import InputFile
from data_prep.sources.records import READ_BYTES, Outcome, Place, Reading, Rejected, from_fields

_SPACE = " \t\r\n"


class _Buffer:
    """A sliding window of characters over the file."""

    def __init__(self, file: InputFile) -> None:
        self.stream, self.watch = open_input(file)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = ""
        self.at = 0
        self.ended = False

    def grow(self) -> None:
        """Appends at least as much as is held already, so that a long value costs linear time."""
        data = self.stream.read(max(READ_BYTES, len(self.text) - self.at))
        self.ended = not data
        # A cut archive's last character may be incomplete; the damage is reported by itself.
        final = self.ended and (self.watch is None or self.watch.damage is None)
        self.text = self.text[self.at :] + self._decoder.decode(data, final=final)
        self.at = 0

    def peek(self) -> str:
        """The next character that is no white space, or "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.grow()


def _complete(buffer: _Buffer, end: int) -> bool:
    """A number or word that touches the window's end may go on; anything else is closed by its own sign."""
    return buffer.ended or end < len(buffer.text) or buffer.text[end - 1] in '}]"'


def _values(buffer: _Buffer, file: InputFile, reading: Reading) -> Iterator[Outcome]:
    decoder = json.JSONDecoder()
    if buffer.peek() == "\ufeff":
        buffer.at += 1
    array = buffer.peek() == "["
    buffer.at += array
    row = 0
    while True:
        sign = buffer.peek()
        if array and sign == "]":
            return
        if sign == "" and not array:
            return
        if array and row and sign != "":
            if sign != ",":
                yield Rejected("invalid_json", Place(file.name, row=row + 1), f"{sign!r} between values; rest left out")
                return
            buffer.at += 1
            sign = buffer.peek()
        row += 1
        place = Place(file.name, row=row)
        while True:
            try:
                value, end = decoder.raw_decode(buffer.text, buffer.at)
                if _complete(buffer, end):
                    break
            except (ValueError, RecursionError) as error:
                reason = " ".join(str(error).split())
                if buffer.ended:
                    damage = buffer.watch.damage if buffer.watch else None
                    yield Rejected(damage or "invalid_json", place, f"{reason}; rest of the file left out")
                    return
                if len(buffer.text) - buffer.at > 4 * reading.max_record_bytes:
                    yield Rejected("record_too_large", place, "no value ends here; rest of the file left out")
                    return
            buffer.grow()
        buffer.at = end
        yield from_fields(value, place, reading)


def read_json(file: InputFile, reading: Reading) -> Iterator[Outcome]:
    """Documents of a `.json` file in order. After a fault that hides where values begin, the rest is left out."""
    buffer = _Buffer(file)
    with buffer.stream:
        try:
            yield from _values(buffer, file, reading)
        except UnicodeDecodeError:
            yield Rejected("invalid_utf8", Place(file.name), "rest of the file left out")
