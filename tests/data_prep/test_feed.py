from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.errors import DataError
from data_prep.feed import Feed, Share
from data_prep.mixture import Mixture, Source
from tests.support.datasets import write_dataset
from tests.support.mixtures import CONTEXT, mixture


@given(
    plan=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2]), st.integers(1, 3)), min_size=1, max_size=3
    )
)
@settings(deadline=None, max_examples=6)
def test_steps_are_the_same_for_any_ranks_and_resumes(
    folders: dict[str, Path], plan: list[tuple[int, int, int]]
) -> None:
    """Runs of some steps each, resumed at another world size and micro-batch size."""
    global_batch = 12
    mixed = mixture(folders, {"a": 3, "b": 1})
    consumed, steps = 0, []
    for world_size, micro_batch, count in plan:
        feeds = [
            Feed(mixed, Share(global_batch, micro_batch, rank, world_size), consumed) for rank in range(world_size)
        ]
        per_step = global_batch // (world_size * micro_batch)
        for _ in range(count):
            steps.append(np.concatenate([next(feed).tokens.numpy() for _ in range(per_step) for feed in feeds]))
        assert {feed.consumed for feed in feeds} == {consumed + count * global_batch}
        consumed = feeds[0].consumed
        for feed in feeds:
            feed.close()
    expected = mixed.samples(np.arange(consumed))
    assert np.array_equal(np.concatenate(steps), expected)


def test_documents_come_with_their_tokens(folders: dict[str, Path]) -> None:
    mixed = mixture(folders, {"a": 1, "b": 1})
    with Feed(mixed, Share(4, 2, 1, 2), consumed=8, with_documents=True) as feed:
        batch = next(feed)
    positions = np.array([10, 11])
    assert np.array_equal(batch.tokens.numpy(), mixed.samples(positions))
    assert batch.documents is not None
    # Each source's shards are a document each.
    starts = {0: [0, 67, 134], 1: [0, 27, 54]}
    for tokens, documents in zip(batch.tokens.numpy(), batch.documents.numpy(), strict=True):
        source, offsets = tokens[0] // 1000, tokens % 1000
        assert documents.tolist() == (np.searchsorted(starts[source], offsets, side="right") - 1).tolist()


def test_a_fault_while_reading_ahead_is_raised(folders: dict[str, Path], tmp_path: Path) -> None:
    write_dataset(tmp_path, {"train": [np.arange(101)]})
    mixed = Mixture([Source(tmp_path, 1)], "train", CONTEXT, 0)
    (tmp_path / "corpus-train-00000.bin").unlink()
    with Feed(mixed, Share(2, 2, 0, 1)) as feed, pytest.raises(DataError, match="cannot be mapped"):
        next(feed)


def test_shares_that_do_not_fit_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="global batch 10 is no multiple of micro-batch 2 x 3 ranks"):
        Share(10, 2, 0, 3)
    with pytest.raises(DataError, match="5 samples consumed is no multiple"):
        Feed(mixture(folders, {"a": 1}), Share(4, 2, 0, 1), consumed=5)
