"""Cutting long text where no tokenizer joins across, so that a document of any length needs little memory.

A cut lies between an ASCII letter and the space before another letter, or the line break, that follows it. The
pre-tokenizers of GPT-2, cl100k and o200k end a token there, and SentencePiece models keep letters and a following
space or break apart, so the pieces encode to what the whole encodes to. Where 4,096 characters hold no such place
the text is cut at its limit; it still decodes to itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

SEGMENT_CHARS = 1 << 12  # SentencePiece is 4 times as fast on 2 KiB as on 1 MiB at once
# Greedy, so that the last place is found first.
_SPACE_CUT = re.compile(r".*[A-Za-z](?= [A-Za-z])", re.DOTALL)
_ANY_CUT = re.compile(r".*[A-Za-z](?= [A-Za-z]|\n)", re.DOTALL)


def _cut(text: str, start: int, at_breaks: bool) -> int:
    """End of the segment that begins at `start`; depends on its SEGMENT_CHARS characters alone."""
    limit = start + SEGMENT_CHARS
    place = (_ANY_CUT if at_breaks else _SPACE_CUT).match(text, start, limit)
    return place.end() if place else limit


def segments(text: str, at_breaks: bool = True) -> Iterator[str]:
    """Parts of at most SEGMENT_CHARS characters that join to `text`."""
    start = 0
    while len(text) - start > SEGMENT_CHARS:
        end = _cut(text, start, at_breaks)
        yield text[start:end]
        start = end
    yield text[start:]


def segments_of_chunks(chunks: Iterable[str], at_breaks: bool = True) -> Iterator[str]:
    """The segments of the joined chunks, without joining them."""
    held = ""
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start > SEGMENT_CHARS:
            end = _cut(held, start, at_breaks)
            yield held[start:end]
            start = end
        held = held[start:]
    yield held
