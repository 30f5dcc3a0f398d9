from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import DataError
from data_prep.order import SampleOrder
from tests.support.mixtures import CONTEXT, SAMPLES, mixture


def test_one_source_is_its_own_order(folders: dict[str, Path]) -> None:
    mixed = mixture(folders, {"a": 1}, seed=7)
    windows = mixed.samples(np.arange(120))
    ids = SampleOrder(SAMPLES["a"], seed=7).sample_ids(0, 120)
    assert np.array_equal(windows, ids[:, None] * CONTEXT + np.arange(CONTEXT + 1))


def test_weights_hold_at_every_moment_and_epochs_cover_each_source(folders: dict[str, Path]) -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    mixed = mixture(folders, weights)
    count = 70_000  # beyond one cycle
    sources, steps = mixed.locate(np.arange(count))
    for source, weight in enumerate(weights.values()):
        given_so_far = np.cumsum(sources == source)
        assert np.abs(given_so_far - weight * np.arange(1, count + 1)).max() < 2.5
        assert np.array_equal(steps[sources == source], np.arange(given_so_far[-1]))
    windows = mixed.samples(np.arange(400))
    for source, samples in enumerate(SAMPLES.values()):
        firsts = windows[sources[:400] == source, 0] - 1000 * source
        epoch = firsts[:samples]
        assert sorted(epoch.tolist()) == list(range(0, samples * CONTEXT, CONTEXT))
    counted = Counter(sources[:400].tolist())
    assert mixed.epochs(400) == [counted[i] / samples for i, samples in enumerate(SAMPLES.values())]


def test_fingerprint_follows_sources_and_weights(folders: dict[str, Path]) -> None:
    plain = mixture(folders, {"a": 1, "b": 1}).fingerprint
    assert mixture(folders, {"a": 2, "b": 2}).fingerprint == plain
    others: list[dict[str, float]] = [{"a": 1, "b": 2}, {"b": 1, "a": 1}, {"a": 1, "c": 1}]
    for other in others:
        assert mixture(folders, other).fingerprint != plain


def test_what_does_not_fit_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="expected positive numbers"):
        mixture(folders, {"a": 0})
