"""A document per file, of any size."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from data_prep.sources.archives import open_input
from data_prep.sources.files import InputFile
from data_prep.sources.long_records import check_long
from data_prep.sources.records import READ_BYTES, Outcome, Place, Rejected, checked, decoded

LARGE_BYTES = 1 << 25  # above this a document is streamed and never held as a whole


def _chunks(file: InputFile) -> Iterator[str]:
    stream, _ = open_input(file)
    with stream:
        decoder = codecs.getincrementaldecoder("utf-8")()
        while data := stream.read(READ_BYTES):
            yield decoder.decode(data)
        decoder.decode(b"", final=True)


def _check_large(file: InputFile, place: Place) -> Outcome:
    """The archive is read to its end first, so that damage there is known."""
    if file.compression:
        stream, watch = open_input(file)
        size = 0
        with stream:
            while data := stream.read(READ_BYTES):
                size += len(data)
            if watch is not None and watch.damage is not None:
                return Rejected(watch.damage, place, f"after {size} bytes of text")
    return check_long(lambda: _chunks(file), place)


def read_file(file: InputFile) -> Outcome:
    """The one document of a text file; a damaged archive gives none."""
    place = Place(file.name)
    try:
        stream, watch = open_input(file)
        with stream:
            data = stream.read(LARGE_BYTES + 1)
            if len(data) > LARGE_BYTES:
                return _check_large(file, place)
            if watch is not None and watch.damage is not None:
                return Rejected(watch.damage, place, f"after {len(data)} bytes of text")
    except OSError as error:
        return Rejected("unreadable", place, error.strerror or "")
    text = decoded(data, place)
    return text if isinstance(text, Rejected) else checked(text, place)
