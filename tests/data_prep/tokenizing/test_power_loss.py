"""From whatever a kill or a power cut leaves, the same command goes on to the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.filters import Filters
from data_prep.manifest import load_manifest
from data_prep.sources.records import Reading
from data_prep.tokenizer import TokenizerSpec
from data_prep.tokenizing import job, shard
from data_prep.tokenizing.pool import Pool, worker_pool
from data_prep.tokenizing.worker import WorkerSetup
from tests.support.corpora import files_of, texts
from tests.support.power_loss import Disk


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[Pool]:
    """One worker process for the many runs of this module."""
    setup = WorkerSetup(
        TokenizerSpec(model_file), False, "uint16", Reading(), Filters(), 0.3, tmp_path_factory.mktemp("s")
    )
    with worker_pool(setup, 1) as pool:
        yield pool


@pytest.mark.parametrize("options", [[], ["--deduplicate"]], ids=["plain", "deduplicated"])
def test_every_moment_can_be_gone_on_from(
    options: list[str], tmp_path: Path, model_file: Path, workers: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def same_workers(setup: WorkerSetup, count: int) -> Iterator[Pool]:
        yield workers

    monkeypatch.setattr(job, "worker_pool", same_workers)
    monkeypatch.setattr(shard, "_COMMIT_SECONDS", 0.0)  # a commit after each piece
    source = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": text}) for text in [*texts(20, 1), *texts(5, 1)]]
    source.write_text("\n".join([*lines[:7], "{}", *lines[7:], "broken"]))
    sizes = ["--piece-bytes", str(source.stat().st_size // 6 + 1), "--shard-bytes", str(source.stat().st_size // 2 + 1)]

    def tokenize(out: Path) -> None:
        line = ["tokenize", "--input", source, "--tokenizer", model_file, "--out", out, "--name", "corpus"]
        assert main([*map(str, line), *sizes, "--validation-fraction", "0.3", "--workers", "1", *options]) == 0

    root = tmp_path / "root"
    root.mkdir()
    states = tmp_path / "states"
    states.mkdir()
    disk = Disk(root, states)
    with disk.watched():
        tokenize(root / "out")
    expected = files_of(root / "out")
    manifest = load_manifest(root / "out")
    assert len(manifest.splits["train"].shards) == 2
    assert manifest.rejected == {"invalid_json": 1, "missing_field": 1, **({"duplicate": 5} if options else {})}

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    seen, finished = set(), 0
    for state in sorted(states.iterdir()):
        for left in state.rglob(f".*.{os.getpid()}.tmp"):  # another process would have written it
            left.rename(left.with_name(left.name.replace(str(os.getpid()), "1")))
        content = hashlib.sha256(repr(sorted(files_of(state).items())).encode()).digest()
        if content in seen:
            continue
        seen.add(content)
        finished += (state / "out/manifest.json").exists()
        tokenize(state / "out")
        assert files_of(state / "out") == expected, state.name
    assert len(seen) > 50
    # The manifest is the last file to appear: by then everything else is on disk.
    assert finished <= 2
