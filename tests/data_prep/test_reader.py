from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.errors import DataError
from data_prep.manifest import Split, load_manifest
from data_prep.reader import open_split
from tests.support.datasets import write_dataset
from tests.support.memory import resident_bytes


def test_windows_cross_documents_and_shards(tmp_path: Path) -> None:
    tokens = np.arange(100)
    write_dataset(tmp_path, {"train": [tokens[:7], tokens[7:8], tokens[8:50], tokens[50:]]})
    split = open_split(tmp_path, "train")
    assert split.num_tokens == 100
    starts = np.array([0, 5, 49, 99 - 11, 6])
    windows = split.windows(starts, 12)
    assert windows.dtype == np.int64
    assert np.array_equal(windows, starts[:, None] + np.arange(12))


@given(data=st.data())
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_windows_are_slices_of_the_stream(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any))
    dtype = data.draw(st.sampled_from(["uint16", "int32"]))
    stream = np.random.default_rng(0).integers(0, 60_000, sum(sizes))
    folder = tmp_path_factory.mktemp("stream")
    write_dataset(folder, {"train": np.split(stream, np.cumsum(sizes)[:-1])}, dtype=dtype)
    split = open_split(folder, "train")
    length = data.draw(st.integers(1, sum(sizes)))
    starts = np.array(data.draw(st.lists(st.integers(0, sum(sizes) - length), max_size=5)), dtype=np.int64)
    expected = [stream[start : start + length] for start in starts]
    assert split.windows(starts, length).tolist() == [row.tolist() for row in expected]


def test_a_window_outside_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, {"train": [np.arange(10)]})
    split = open_split(tmp_path, "train")
    for start in (-1, 7):
        with pytest.raises(DataError, match="outside its 10 tokens"):
            split.windows(np.array([start]), 4)


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    write_dataset(tmp_path, {"train": [np.full(2, shard) for shard in range(1500)]})
    windows = open_split(tmp_path, "train").windows(np.arange(0, 3000, 2), 2)
    assert np.array_equal(windows[:, 0], np.arange(1500))


def test_a_hundred_thousand_shards_open_in_seconds(tmp_path: Path) -> None:
    """Hard links to one pair stand for the shards: their number is what costs time."""
    made = write_dataset(tmp_path, {"train": [np.arange(8)]})
    shards = []
    for number in range(100_000):
        prefix = f"{number // 1000:03}/{number:06}"
        if number % 1000 == 0:
            (tmp_path / prefix).parent.mkdir()
            for suffix in ("bin", "idx"):  # a file can have some 65,000 links
                content = (tmp_path / f"corpus-train-00000.{suffix}").read_bytes()
                (tmp_path / f"{prefix}.{suffix}").write_bytes(content)
            first = prefix
        else:
            (tmp_path / f"{prefix}.bin").hardlink_to(tmp_path / f"{first}.bin")
        shards.append(replace(made.splits["train"].shards[0], prefix=prefix))
    split = Split(tokens=800_000, documents=100_000, text_bytes=None, shards=tuple(shards))
    replace(made, splits={"train": split}).save(tmp_path)
    begun = time.process_time()  # of the CPU, which other work on the machine does not stretch
    opened = open_split(tmp_path, "train")
    windows = opened.windows(np.array([0, 799_996, 400_004]), 4)
    assert time.process_time() - begun < 10
    assert windows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]


@pytest.mark.parametrize("bounded", [True, False])
def test_resident_memory_stays_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded: bool) -> None:
    """All of a sparse shard of 192 MiB is read; without the bound all of it would be resident."""
    monkeypatch.setattr("data_prep.reader._MAPPED_BYTES", 1 << 23 if bounded else 1 << 40)
    write_dataset(tmp_path, {"train": [np.arange(8)]}, dtype="uint16")
    tokens = 96 << 20
    stretch(tmp_path, tokens)
    split = open_split(tmp_path, "train")
    before, most = resident_bytes(), 0
    for start in range(0, tokens, 8 << 16):
        split.windows(np.arange(start, start + (8 << 16), 1 << 16), 1 << 15)
        most = max(most, resident_bytes() - before)
    assert most < 48 << 20 if bounded else most > 128 << 20


def stretch(folder: Path, tokens: int, last: Sequence[int] = ()) -> None:
    """Makes the only shard of a folder a sparse file of so many tokens that ends with `last`."""
    path, dtype = folder / "corpus-train-00000.bin", load_manifest(folder).dtype
    size = path.stat().st_size
    ends = np.array(last, dtype=dtype).tobytes()
    with path.open("r+b") as file:
        file.truncate(tokens * np.dtype(dtype).itemsize - len(ends))
        file.seek(0, 2)
        file.write(ends)
    manifest = folder / "manifest.json"
    text = manifest.read_text().replace('"tokens": 8', f'"tokens": {tokens}')
    manifest.write_text(text.replace(f'"bin_bytes": {size}', f'"bin_bytes": {path.stat().st_size}'))


def test_tokens_beyond_four_gibibytes(tmp_path: Path) -> None:
    """A sparse shard whose last tokens lie past 4 GiB."""
    write_dataset(tmp_path, {"train": [np.arange(8)]}, dtype="int32")
    tokens = 2**30 + 1000
    stretch(tmp_path, tokens, [1, 2, 3, 4])
    split = open_split(tmp_path, "train")
    assert split.windows(np.array([tokens - 4, 0]), 4).tolist() == [[1, 2, 3, 4], [0, 1, 2, 3]]


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a dataset folder"):
        open_split(tmp_path, "train")
    (tmp_path / ".building").mkdir()
    with pytest.raises(DataError, match="has not finished"):
        open_split(tmp_path, "train")
    (tmp_path / ".building").rmdir()
    write_dataset(tmp_path, {"train": [np.arange(10)]})
    with pytest.raises(DataError, match="no split 'validation'; it has train"):
        open_split(tmp_path, "validation")
    shard = tmp_path / "corpus-train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match="18 bytes, the manifest says 20"):
        open_split(tmp_path, "train")
    shard.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        open_split(tmp_path, "train")


def test_fingerprint_follows_the_tokens(tmp_path: Path) -> None:
    for name, tokens in [("a", [1, 2, 3]), ("b", [1, 2, 4]), ("c", [1, 2, 3])]:
        write_dataset(tmp_path / name, {"train": [np.array(tokens)]})
    a, b, c = (load_manifest(tmp_path / name).fingerprint for name in "abc")
    assert a == c != b


def test_reading_needs_numpy_alone() -> None:
    code = (
        "import sys, data_prep.reader, data_prep.order, data_prep.tokenizer\n"
        "assert not {'torch', 'sentencepiece'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
