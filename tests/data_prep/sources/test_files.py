from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.errors import DataError
from data_prep.sources.corpus import Corpus
from data_prep.sources.files import find_files, kind_of, listing_fingerprint
from data_prep.sources.records import Reading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.jsonl.gz", "a/c.parquet", "left.bin", "a/b/x.json.zst"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    return tmp_path / "in"


def test_kinds_follow_suffixes() -> None:
    assert kind_of(Path("x.JSONL.gz")) == ("jsonl", "gz")
    assert kind_of(Path("x.v2.txt")) == ("text", "")
    assert kind_of(Path("x.gz")) is None


def test_folders_files_and_globs(folder: Path) -> None:
    assert [file.name for file in find_files([str(folder)])] == [
        "a/b/x.json.zst",
        "a/c.parquet",
        "a/z.jsonl.gz",
        "b.txt",
    ]
    assert [file.name for file in find_files([str(folder / "**/*.json*")])] == ["a/b/x.json.zst", "a/z.jsonl.gz"]
    named = find_files([str(folder / "b.txt"), str(folder / "a")])
    assert [file.name for file in named] == ["b.txt", "b/x.json.zst", "c.parquet", "z.jsonl.gz"]


@pytest.mark.parametrize(
    ("argument", "match"), [("absent", "no such file"), ("*.csv", "no such file"), ("left.bin", "unknown suffix")]
)
def test_what_cannot_be_read_is_named(folder: Path, argument: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        find_files([str(folder / argument)])


def test_two_inputs_of_one_name_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"2 inputs are called b\.txt"):
        find_files([str(folder / "b.txt"), str(folder / "b.txt")])


def test_fingerprint_sees_names_and_contents_but_not_places(folder: Path, tmp_path: Path) -> None:
    before = listing_fingerprint(find_files([str(folder)]))
    moved = folder.rename(tmp_path / "moved")
    assert listing_fingerprint(find_files([str(moved)])) == before
    (moved / "b.txt").write_bytes(b"B.txt")
    assert listing_fingerprint(find_files([str(moved)])) != before


def test_spans_cover_the_corpus_once(tmp_path: Path) -> None:
    sizes = [1000, 10, 2500, 400, 7]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.{'txt' if number % 2 else 'jsonl'}").write_bytes(b"x" * size)
    corpus = Corpus(tuple(find_files([str(tmp_path)])), Reading(), piece_bytes=100, shard_bytes=600)
    spans = corpus.spans()
    assert sum(corpus.input_bytes(span) for span in spans) == sum(sizes)
    edges = [(span.first_file, span.first_offset) for span in spans] + [(len(sizes), 0)]
    assert [(span.end_file, span.end_offset) for span in spans] == edges[1:]
    assert all(corpus.input_bytes(span) <= 1000 for span in spans)
    pieces = [piece.input_bytes for span in spans for piece in corpus.pieces(span, tmp_path)]
    assert sum(pieces) == sum(sizes)
