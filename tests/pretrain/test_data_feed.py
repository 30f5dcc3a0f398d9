"""Global batches: the same for any cut into ranks and micro-batches, and every token once in an epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.reader import open_split
from deeploop_model import DeepLoopConfig
from pretrain.config import DataConfig, RunConfig, TrainConfig
from pretrain.data_feed import TrainFeed, windows_on_device
from pretrain.ranks import Ranks
from tests.support.datasets import write_dataset

CONTEXT, BATCH = 8, 12


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training split of 1,003 different tokens, so that a token tells its place; in shards of uneven size."""
    folder = tmp_path_factory.mktemp("numbered") / "dataset"
    tokens = np.arange(1003)
    write_dataset(folder, {"train": [tokens[:5], tokens[5:700], tokens[700:]]}, vocab_size=1003)
    return folder


def run_config(micro: int, seed: int = 0) -> RunConfig:
    return RunConfig(
        out="",
        data=DataConfig(path=""),
        train=TrainConfig(steps=100, global_batch_size=BATCH, micro_batch_size=micro, seed=seed),
        model=DeepLoopConfig(context_length=CONTEXT),
    )


def global_batch(folder: Path, step: int, world_size: int, micro: int, seed: int = 0) -> list[tuple[int, ...]]:
    """All (tokens, target) windows of a step, over ranks and micro-batches, sorted."""
    config = run_config(micro, seed)
    rows = []
    for rank in range(world_size):
        accumulation = BATCH // (micro * world_size)
        feed = TrainFeed(open_split(folder, "train"), config, accumulation, Ranks(rank, world_size, local_rank=rank))
        pairs = list(feed.micro_batches(step))
        assert len(pairs) == accumulation
        for tokens_BT, targets_BT, documents_BT in pairs:
            assert documents_BT is None
            assert tokens_BT.shape == targets_BT.shape == (micro, CONTEXT)
            rows += [
                (*tokens.tolist(), int(targets[-1])) for tokens, targets in zip(tokens_BT, targets_BT, strict=True)
            ]
            assert (targets_BT == tokens_BT + 1).all()  # in this dataset the next token is the next number
    return sorted(rows)


@pytest.mark.parametrize("step", [0, 7, 30])
def test_a_global_batch_does_not_depend_on_ranks_or_micro_batches(numbered: Path, step: int) -> None:
    expected = global_batch(numbered, step, world_size=1, micro=12)
    for world_size, micro in [(1, 1), (2, 3), (3, 4), (4, 1), (12, 1)]:
        assert global_batch(numbered, step, world_size, micro) == expected


def test_order_depends_on_seed_and_step(numbered: Path) -> None:
    batches = {tuple(global_batch(numbered, step, 1, 12, seed)) for step in (0, 1) for seed in (0, 1)}
    assert len(batches) == 4


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


def test_every_token_is_seen_once_in_an_epoch(numbered: Path) -> None:
    """1,003 tokens hold 125 windows of 8 (the last two tokens fill none): 375 = 3 epochs of windows, in 4 rank cuts."""
    for world_size, micro in [(1, 12), (2, 3), (4, 1)]:
        seen: list[int] = []
        for step in range(125 * 3 // BATCH + 1):
            feeds = [
                TrainFeed(open_split(numbered, "train"), run_config(micro), 1, Ranks(rank, world_size, rank))
                for rank in range(world_size)
            ]
            for accumulated in range(BATCH // (micro * world_size)):
                for feed in feeds:
                    seen += feed.sample_ids(step, accumulated).tolist()
        for epoch in range(3):
            assert sorted(seen[epoch * 125 : (epoch + 1) * 125]) == list(range(125))
        counts = Counter(t for sample in seen[:125] for t in range(sample * CONTEXT, (sample + 1) * CONTEXT))
        assert counts == Counter(range(1000))
        assert seen[:125] != seen[125:250]
