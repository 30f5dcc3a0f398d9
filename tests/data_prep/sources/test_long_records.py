"""Documents longer than a record may be: streamed, they are what they would be if they were held."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.sources import long_records, streams
from data_prep.sources.corpus import Corpus
from data_prep.sources.files import find_files
from data_prep.sources.lines import read_records
from data_prep.sources.records import LargeRecord, Outcome, Reading, Record, Rejected

PARTS = st.lists(
    st.sampled_from(
        ["word ", '"quoted"', "\\", "\\\\", "\n", "é", "数据", "\U0001f600", "/", "</s>", "\ud83d", "\0", "a" * 30]
    ),
    min_size=1,
    max_size=40,
)


def outcome_of(line: bytes, limit: int) -> Outcome:
    (found,) = read_records(
        io.BytesIO(line),
        "f",
        "jsonl",
        1,
        len(line),
        Reading(max_record_bytes=limit, id_field="id"),
        lambda: io.BytesIO(line),
    )
    return found


def summary(outcome: Outcome) -> tuple[str, str | None]:
    if isinstance(outcome, Rejected):
        return outcome.reason, outcome.place.id
    return (outcome.text if isinstance(outcome, Record) else "".join(outcome.chunks())), outcome.place.id


@given(parts=PARTS, escaped=st.booleans(), block=st.integers(1, 50), cut=st.integers(0, 3))
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_a_streamed_json_line_is_what_a_held_one_is(
    parts: list[str], escaped: bool, block: int, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_records, "READ_BYTES", block)
    monkeypatch.setattr(long_records, "_HELD_STRING_BYTES", 20)
    value = {"id": "7", "other": "".join(parts[:5]), "text": "".join(parts), "n": [1, {"a": "}"}]}
    line = json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    line = line[: len(line) - cut]
    held, streamed = outcome_of(line, 1 << 20), outcome_of(line, 200)
    if b"\xed\xa0" in line:  # an encoded surrogate is no UTF-8, wherever it is found
        assert summary(held)[0] == summary(streamed)[0] == "invalid_utf8"
    else:
        assert summary(streamed) == summary(held)


def test_lines_that_cannot_be_used_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_records, "_HELD_STRING_BYTES", 20)
    long = b"y" * 100
    cases = {
        b'{"text": "' + long + rb'\q"}': "invalid_json",
        b'{"text": "' + long + b'\t"}': "invalid_json",  # a bare control character
        b'{"text": "' + long + rb'\ud800"}': "lone_surrogate",
        b'{"text": "' + long + rb'\u0000"}': "nul_byte",
        b'{"text": "' + long + b'\xff"}': "invalid_utf8",
        b'{"text": "' + long: "invalid_json",
        b'{"text": "' + b" " * 100 + b'"}': "empty",
        b'{"other": "' + long + b'"}': "missing_field",
        b'{"text": 1, "other": "' + long + b'"}': "not_a_string",
        b'"' + long + b'"': "not_an_object",
        b"[" + b"1, " * 60: "record_too_large",
    }
    for line, reason in cases.items():
        found = outcome_of(line, 90)
        assert isinstance(found, Rejected), line
        assert found.reason == reason, line


@pytest.mark.parametrize(("suffix", "unit"), [("jsonl", "file"), ("txt", "line"), ("txt", "block")])
def test_long_records_of_compressed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, unit: str
) -> None:
    monkeypatch.setattr(streams, "_INLINE_BYTES", 3000)
    monkeypatch.setattr(long_records, "_HELD_STRING_BYTES", 20)
    texts = ["first", "größer " * 1000, "last"]
    lines = [json.dumps({"text": text}) if suffix == "jsonl" else text for text in texts]
    path = tmp_path / f"a.{suffix}.gz"
    path.write_bytes(gzip.compress(("\n\n" if unit == "block" else "\n").join(lines).encode()))
    reading = Reading(text_unit=unit, max_record_bytes=500)
    corpus = Corpus(tuple(find_files([str(path)])), reading, piece_bytes=50)
    found: list[str] = []
    kinds: list[type] = []
    for span in corpus.spans():
        for piece in corpus.pieces(span, tmp_path):
            for outcome in piece.outcomes(reading):
                kinds.append(type(outcome))
                found.append(summary(outcome)[0])
    assert kinds == [Record, LargeRecord, Record]
    assert found == texts
    assert [left.name for left in tmp_path.iterdir()] == [path.name]
