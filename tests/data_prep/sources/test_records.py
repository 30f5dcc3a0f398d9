"""Dirty input: each fault has its stated answer, with the place where it lies."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sources.corpus import Corpus
from data_prep.sources.files import find_files
from data_prep.sources.lines import read_records, seek_record
from data_prep.sources.records import LargeRecord, Reading, Record, Rejected

LINES: list[tuple[bytes, str | None]] = [
    (b'{"text": "good"}', None),
    (b'{"text": "caf\xe9"}', "invalid_utf8"),
    (b'{"text": "cut off', "invalid_json"),
    (b"[1, 2]", "not_an_object"),
    (b'{"other": "x"}', "missing_field"),
    (b'{"text": 7}', "not_a_string"),
    (b'{"text": null}', "not_a_string"),
    (b'{"text": ""}', "empty"),
    (b'{"text": " \\n\\t"}', "empty"),
    (b'{"text": "a\\u0000b"}', "nul_byte"),
    (b'{"text": "\\ud800"}', "lone_surrogate"),
    (b'{"text": "\\ud83d\\ude00"}', None),
    (b"", "blank_line"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"text": "' + b"x" * 5000 + b'"}', None),
    (b'{"text": "last"}', None),
]


def outcomes(path: Path, tmp_path: Path, reading: Reading, piece_bytes: int = 1 << 21) -> list[Record | Rejected]:
    """What the corpus of this one path gives; streamed documents are joined."""
    corpus = Corpus(tuple(find_files([str(path)])), reading, piece_bytes=piece_bytes, shard_bytes=4 * piece_bytes)
    found: list[Record | Rejected] = []
    for span in corpus.spans():
        for piece in corpus.pieces(span, tmp_path):
            for outcome in piece.outcomes(reading):
                if isinstance(outcome, LargeRecord):
                    outcome = Record("".join(outcome.chunks()), outcome.place)
                found.append(outcome)
    return found


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("piece_bytes", [7, 1 << 21])
def test_every_fault_in_json_lines(
    tmp_path: Path, suffix: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.sources.long_records._HELD_STRING_BYTES", 1000)
    content = b"\n".join(line for line, _ in LINES)
    packed = {"": content, ".gz": gzip.compress(content), ".zst": zstandard.ZstdCompressor().compress(content)}
    path = tmp_path / f"dirty.jsonl{suffix}"
    path.write_bytes(packed[suffix])
    found = outcomes(path, tmp_path, Reading(max_record_bytes=101_000 if piece_bytes > 7 else 4000), piece_bytes)
    reasons = [outcome.reason if isinstance(outcome, Rejected) else None for outcome in found]
    expected = [reason for _, reason in LINES]
    if piece_bytes == 7:
        expected[13] = "record_too_large"
    assert isinstance(found[14], Record)
    assert found[14].text == "x" * 5000  # streamed where it is longer than a record may be
    assert reasons == expected
    if suffix:
        assert [outcome.place.line for outcome in found] == list(range(1, len(LINES) + 1))
    else:
        starts = [content.index(line) for line, _ in LINES[:6]]
        assert [outcome.place.offset for outcome in found[:6]] == starts


@given(
    lines=st.lists(st.sampled_from([b"one", b"two words", b"", b"\r", b"x" * 40, "é€😀".encode()]), max_size=25),
    end=st.sampled_from([b"", b"\n", b"\n\n"]),
    piece=st.integers(1, 60),
    unit=st.sampled_from(["line", "block"]),
    kind=st.sampled_from(["text", "jsonl"]),
)
@settings(deadline=None, max_examples=300)
def test_pieces_cover_each_record_once(lines: list[bytes], end: bytes, piece: int, unit: str, kind: str) -> None:
    """However a file is cut into ranges, the records are those of the whole file."""
    content = b"\n".join(lines) + end
    reading = Reading(text_unit=unit, max_record_bytes=30)

    def reopen() -> io.BytesIO:
        return io.BytesIO(content)

    whole = list(read_records(reopen(), "f", kind, 1, len(content), reading, reopen))
    parts = []
    for start in range(0, len(content), piece):
        stop = min(start + piece, len(content))
        stream = reopen()
        if seek_record(stream, start, stop, kind == "text" and unit == "block"):
            parts += list(read_records(stream, "f", kind, 1, stop, reading, reopen))
    assert [(type(part), part.place.offset) for part in parts] == [(type(part), part.place.offset) for part in whole]
    assert [text_of(part) for part in parts] == [text_of(part) for part in whole]
    if kind == "text":  # long ones were streamed
        held = read_records(reopen(), "f", kind, 1, len(content), Reading(text_unit=unit), reopen)
        assert [text_of(part) for part in whole] == [text_of(part) for part in held]


def text_of(outcome: Record | LargeRecord | Rejected) -> str:
    if isinstance(outcome, Rejected):
        return outcome.reason
    return outcome.text if isinstance(outcome, Record) else "".join(outcome.chunks())


def test_what_a_document_is_in_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\nfirst\nstill first\n\n\n\nsecond\r\n\r\nthird")
    texts = {}
    for unit in ("file", "line", "block"):
        texts[unit] = [
            found.text for found in outcomes(path, tmp_path, Reading(text_unit=unit)) if isinstance(found, Record)
        ]
    assert texts["file"] == [path.read_bytes().decode()]
    assert texts["line"] == ["first", "still first", "second", "third"]
    assert texts["block"] == ["first\nstill first", "second", "third"]


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_truncated_archive_is_told(tmp_path: Path, kind: str, suffix: str, keep: float) -> None:
    rows = [json.dumps({"text": f"row {number} {hash(str(number))}"}) for number in range(20_000)]
    content = "\n".join(rows).encode()
    packed = gzip.compress(content) if suffix == "gz" else zstandard.ZstdCompressor().compress(content)
    path = tmp_path / f"cut.{kind}.{suffix}"
    path.write_bytes(packed[: int(len(packed) * keep)])
    found = outcomes(path, tmp_path, Reading(), 1 << 16)
    last = found[-1]
    assert isinstance(last, Rejected)
    assert last.reason == "truncated_archive"
    good = [outcome for outcome in found[:-1] if isinstance(outcome, Record)]
    assert len(good) == len(found) - 1
    if kind == "txt":
        assert good == []
    else:
        assert [outcome.text for outcome in good] == [json.loads(row)["text"] for row in rows[: len(good)]]
        assert last.place.line == len(good) + 1
        assert len(good) > 15_000 or keep < 0.9


def test_a_corrupt_archive_is_told(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"text": "a"}\n' * 1000))
    packed[-6] ^= 1  # in the checksum
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(bytes(packed))
    assert "corrupt_archive" in [
        found.reason for found in outcomes(path, tmp_path, Reading()) if isinstance(found, Rejected)
    ]


def test_joined_archives_are_read_to_the_end(tmp_path: Path) -> None:
    for suffix, compress in [("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress)]:
        path = tmp_path / f"a.jsonl.{suffix}"
        path.write_bytes(compress(b'{"text": "a"}\n') + compress(b'{"text": "b"}\n'))
        assert [found.text for found in outcomes(path, tmp_path, Reading()) if isinstance(found, Record)] == ["a", "b"]


def test_json_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    rows = [{"text": f"row {number}", "n": number} for number in range(3000)]
    expected = [row["text"] for row in rows]
    for content in (json.dumps(rows), json.dumps(rows, indent=2), "\n".join(map(json.dumps, rows))):
        path.write_text(content)
        found = outcomes(path, tmp_path, Reading(), 1000)
        assert [outcome.text for outcome in found if isinstance(outcome, Record)] == expected
    path.write_text(json.dumps(rows)[:-30])
    found = outcomes(path, tmp_path, Reading())
    assert len(found) == 3000
    assert isinstance(found[-1], Rejected)
    assert found[-1].reason == "invalid_json"
    assert found[-1].place.row == 3000
    path.write_text('{"text": "alone"}')
    assert [outcome.text for outcome in outcomes(path, tmp_path, Reading()) if isinstance(outcome, Record)] == ["alone"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_parquet(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"text": ["a", None, "b", "c\0"], "id": ["w", "x", "y", "z"], "n": [1, 2, 3, 4]})
    plain = tmp_path / "plain.parquet"
    pq.write_table(table, plain, row_group_size=2)
    path = tmp_path / f"t.parquet{suffix}"
    path.write_bytes(gzip.compress(plain.read_bytes()) if suffix else plain.read_bytes())
    found = outcomes(path, tmp_path, Reading(id_field="id"))
    assert [(outcome.place.row, outcome.place.id) for outcome in found] == [(1, "w"), (2, "x"), (3, "y"), (4, "z")]
    reasons = [outcome.reason if isinstance(outcome, Rejected) else outcome.text for outcome in found]
    assert reasons == ["a", "not_a_string", "b", "nul_byte"]


def test_damaged_parquet_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": [f"row {number}" for number in range(1000)]}), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    found = outcomes(path, tmp_path, Reading())
    assert [outcome.reason for outcome in found if isinstance(outcome, Rejected)] == ["unreadable"]


def test_a_million_repeated_characters_and_a_long_line_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a" * 1_000_000 + "\n" + "b " * 3_000_000 + "\nend")
    found = outcomes(path, tmp_path, Reading(text_unit="line"), 1 << 16)
    assert [len(outcome.text) for outcome in found if isinstance(outcome, Record)] == [1_000_000, 6_000_000, 3]
