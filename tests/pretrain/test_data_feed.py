"""Global batches: the same for any cut into ranks and micro-batches, and every token once in an epoch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.reader import open_split
from deeploop_model import DeepLoopConfig
from pretrain.config import DataConfig, RunConfig, TrainConfig, WeightedDataset
from pretrain.data_feed import TrainFeed, windows_on_device
from pretrain.ranks import Ranks
from pretrain.run_data import open_data
from tests.support.datasets import write_dataset

CONTEXT, BATCH = 8, 12


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training split of 1,003 different tokens, so that a token tells its place; in shards of uneven size."""
    folder = tmp_path_factory.mktemp("numbered") / "dataset"
    tokens = np.arange(1003)
    write_dataset(folder, {"train": [tokens[:5], tokens[5:700], tokens[700:]]}, vocab_size=1003)
    return folder


def run_config(folder: Path, micro: int, seed: int = 0) -> RunConfig:
    return RunConfig(
        out="unused",
        data=DataConfig(path=str(folder)),
        train=TrainConfig(steps=100, global_batch_size=BATCH, micro_batch_size=micro, seed=seed, validate_every=0),
        model=DeepLoopConfig(context_length=CONTEXT),
    )


def global_batches(
    folder: Path, steps: Sequence[int], world_size: int, micro: int, seed: int = 0
) -> list[list[tuple[int, ...]]]:
    """For each step all (tokens, target) windows over ranks and micro-batches, sorted."""
    config = run_config(folder, micro, seed)
    accumulation = BATCH // (micro * world_size)
    found: list[list[tuple[int, ...]]] = [[] for _ in steps]
    for rank in range(world_size):
        feed = TrainFeed(open_data(config), config, accumulation, Ranks(rank, world_size, local_rank=rank))
        for rows, step in zip(found, steps, strict=True):
            batches = list(feed.micro_batches(step))
            assert len(batches) == accumulation
            for tokens_BT, targets_BT, documents_BT in batches:
                assert documents_BT is None
                assert tokens_BT.shape == targets_BT.shape == (micro, CONTEXT)
                rows += [(*t.tolist(), int(target[-1])) for t, target in zip(tokens_BT, targets_BT, strict=True)]
                assert (targets_BT == tokens_BT + 1).all()  # in this dataset the next token is the next number
        feed.close()
    return [sorted(rows) for rows in found]


def test_a_global_batch_does_not_depend_on_ranks_or_micro_batches_or_on_what_was_read_before(numbered: Path) -> None:
    expected = global_batches(numbered, [0, 1, 7, 8, 30], world_size=1, micro=12)
    for world_size, micro in [(1, 1), (2, 3), (3, 4), (4, 1), (12, 1)]:
        assert global_batches(numbered, [0, 1, 7, 8, 30], world_size, micro) == expected
    assert global_batches(numbered, [30, 7, 1], 2, 3) == [expected[4], expected[2], expected[1]]


def test_order_depends_on_seed_and_step(numbered: Path) -> None:
    batches = {tuple(rows) for seed in (0, 1) for rows in global_batches(numbered, [0, 1], 1, 12, seed)}
    assert len(batches) == 4


def test_every_token_is_seen_once_in_an_epoch(numbered: Path) -> None:
    """1,003 tokens hold 125 windows of 8 (the last two tokens fill none): 375 = 3 epochs of windows."""
    steps = range(125 * 3 // BATCH)
    seen = [row[0] // CONTEXT for rows in global_batches(numbered, steps, 2, 3) for row in rows]
    counts = Counter(seen)
    assert set(counts) == set(range(125))
    assert sum(counts.values()) == len(steps) * BATCH == 372
    assert set(counts.values()) <= {2, 3}  # the third epoch lacks its last 3 windows
    first = Counter(row[0] // CONTEXT for rows in global_batches(numbered, range(10), 4, 1) for row in rows)
    assert set(first.values()) == {1}


def test_a_mixture_takes_its_share_from_each_source(tmp_path: Path) -> None:
    """Windows by source: 3 to 1, counted in epochs of each, the same for any ranks."""
    for name, first in (("low", 0), ("high", 5000)):
        write_dataset(tmp_path / name, {"train": [np.arange(first, first + 403)]}, vocab_size=6000)
    sources = (WeightedDataset(str(tmp_path / "low"), 3.0), WeightedDataset(str(tmp_path / "high"), 1.0))
    config = dataclasses.replace(run_config(tmp_path / "low", 4), data=DataConfig(path=sources))
    data = open_data(config)
    assert data.weights == {"low": 0.75, "high": 0.25}
    windows = []
    for rank in range(3):
        feed = TrainFeed(data, config, 1, Ranks(rank, 3, rank))
        windows += [row[0] for step in range(20) for row in next(feed.micro_batches(step)).tokens_BT.tolist()]
        feed.close()
    assert len(windows) == 240
    assert sum(token >= 5000 for token in windows) == 60
    assert data.epochs(240) == {"epoch/low": 180 / 50, "epoch/high": 60 / 50}
    alone = open_data(run_config(tmp_path / "low", 4))
    assert alone.epochs(240) == {"epoch": 240 / 50}
    assert data.training.fingerprint != alone.training.fingerprint


def test_document_ids_count_the_separators(tmp_path: Path) -> None:
    """A separator opens the document after it; the first document of a window may have begun before it."""
    tokens = np.array([5, 0, 7, 8, 0, 0, 9, 4, 6, 3, 0, 2, 1, 1, 1, 1, 1])
    write_dataset(tmp_path / "data", {"train": [tokens]}, vocab_size=10)
    split = open_split(tmp_path / "data", "train")
    device, ids = torch.device("cpu"), np.array([0, 1])
    batch = windows_on_device(split, ids, 8, device, separate_documents=True)
    assert batch.documents_BT is not None
    assert batch.documents_BT.tolist() == [[0, 1, 1, 1, 2, 3, 3, 3], [0, 0, 1, 1, 1, 1, 1, 1]]
    whole = windows_on_device(split, ids, 8, device, separate_documents=False)
    assert whole.documents_BT is None
    assert torch.equal(whole.tokens_BT, batch.tokens_BT)
    assert torch.equal(whole.targets_BT, batch.targets_BT)
