"""Parquet files and Hugging Face datasets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.sources.archives import open_input
from data_prep.sources.files import InputFile
from data_prep.sources.records import Outcome, Place, Reading, Rejected, from_fields

_BATCH_ROWS = 256


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("a .parquet input needs the package `pyarrow`; pip install pyarrow") from error
    return pyarrow.parquet


@contextmanager
def _plain(file: InputFile) -> Iterator[tuple[Path, str | None]]:
    """Path of the table itself, decompressed to a temporary file where the archive wraps it, and its damage."""
    if not file.compression:
        yield file.path, None
        return
    stream, watch = open_input(file)
    with tempfile.NamedTemporaryFile(suffix=".parquet") as copy, stream:
        shutil.copyfileobj(stream, copy, 1 << 20)
        copy.flush()
        yield Path(copy.name), watch.damage if watch else None


def row_groups(file: InputFile) -> list[int]:
    """Rows in each row group of a plain parquet file; one group of 0 where it cannot be opened or is wrapped."""
    if file.compression:
        return [0]
    parquet = _parquet()
    try:
        with parquet.ParquetFile(file.path) as table:
            return [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    except Exception:  # pyarrow raises many kinds; reading the group reports it
        return [0]


def read_parquet(file: InputFile, group: int, first_row: int, reading: Reading) -> Iterator[Outcome]:
    """Documents of one row group, or of a whole wrapped file."""
    parquet = _parquet()
    row = first_row
    with _plain(file) as (path, damage):
        if damage is not None:
            yield Rejected(damage, Place(file.name), "whole file left out")
            return
        try:
            with parquet.ParquetFile(path) as table:
                names = set(table.schema_arrow.names)
                columns = None if reading.text_field not in names else sorted(names)
                groups = [group] if not file.compression else None
                for batch in table.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns):
                    for value in batch.to_pylist():
                        row += 1
                        yield from_fields(value, Place(file.name, row=row), reading)
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            detail = f"{' '.join(str(error).split())[:200]}; rest of row group {group} left out"
            yield Rejected("unreadable", Place(file.name, row=row + 1), detail)


def open_table(name: str, config: str | None, split: str, streaming: bool) -> Any:
    """A Hugging Face dataset: a folder made by `save_to_disk`, or whatever `load_dataset` accepts.

    Raises:
        DataError: the package is absent, or the dataset cannot be opened.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError("--hf needs the package `datasets`; pip install datasets") from error
    try:
        folder = Path(name)
        if (folder / "state.json").exists():
            return datasets.load_from_disk(name)
        if (folder / "dataset_dict.json").exists():
            return datasets.load_from_disk(name)[split]
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # the hub, the file system and every builder raise their own kinds
        raise DataError(f"--hf {name}: cannot be opened ({' '.join(str(error).split())[:300]})") from error


def read_table(table: Any, name: str, start: int, end: int | None, reading: Reading) -> Iterator[Outcome]:
    """Documents of rows [start, end) of a dataset; all rows of a streamed one."""
    rows = table.skip(start) if end is None or not hasattr(table, "select") else table.select(range(start, end))
    for row, value in enumerate(rows, start + 1):
        yield from_fields(value, Place(name, row=row), reading)
