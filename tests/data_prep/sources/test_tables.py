from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from data_prep.errors import DataError
from data_prep.sources.corpus import Corpus, TableSource
from data_prep.sources.records import Reading, Record

TEXTS = [f"text {number}" for number in range(100)]


def texts_of(name: Path | str, tmp_path: Path, *, streaming: bool = False) -> list[str]:
    corpus = Corpus((), Reading(), TableSource(str(name), None, "train", streaming), piece_bytes=200).with_table()
    found = []
    for span in corpus.spans():
        for piece in corpus.pieces(span, tmp_path):
            found += [outcome.text for outcome in piece.outcomes(corpus.reading) if isinstance(outcome, Record)]
    return found


def test_saved_and_loaded_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.sources.corpus._SHARD_ROWS", 30)
    table = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(100))})
    table.save_to_disk(str(tmp_path / "one"))
    assert texts_of(tmp_path / "one", tmp_path) == TEXTS
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "several"))
    assert texts_of(tmp_path / "several", tmp_path) == TEXTS
    (tmp_path / "by_name").mkdir()
    table.to_parquet(str(tmp_path / "by_name/data.parquet"))
    assert texts_of(tmp_path / "by_name", tmp_path, streaming=True) == TEXTS


def test_a_dataset_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be opened"):
        texts_of(tmp_path / "absent", tmp_path)
