from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.errors import DataError
from data_prep.order import Permutation, SampleOrder, num_samples


@given(size=st.integers(1, 3000), key=st.binary(max_size=8))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of ours
def test_permutation_is_a_bijection(size: int, key: bytes) -> None:
    image = Permutation(size, key)(np.arange(size, dtype=np.int64))
    assert sorted(image.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 65_536, 65_537])
def test_every_epoch_covers_every_sample_once(size: int) -> None:
    order = SampleOrder(size, seed=3)
    for epoch in range(2):
        assert np.array_equal(np.sort(order.sample_ids(epoch * size, size)), np.arange(size))


@given(
    size=st.integers(1, 500),
    start=st.integers(0, 5000),
    parts=st.lists(st.integers(0, 300), min_size=1, max_size=5),
)
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no fault of ours
def test_ids_do_not_depend_on_how_they_are_asked_for(size: int, start: int, parts: list[int]) -> None:
    whole = SampleOrder(size, seed=1).sample_ids(start, sum(parts))
    order, position, pieces = SampleOrder(size, seed=1), start, []
    for count in parts:
        pieces.append(order.sample_ids(position, count))
        position += count
    assert np.array_equal(np.concatenate(pieces), whole)


def test_epochs_and_seeds_have_their_own_orders() -> None:
    size = 1000
    first, second = SampleOrder(size, 0).sample_ids(0, 2 * size).reshape(2, size)
    other = SampleOrder(size, 1).sample_ids(0, size)
    # Two independent permutations agree in one place on average.
    for left, right in [(first, second), (first, other), (first, np.arange(size))]:
        assert np.count_nonzero(left == right) < 10


def test_order_looks_random() -> None:
    size, bins = 1 << 16, 64
    ids = SampleOrder(size, seed=0).sample_ids(0, size)
    counts = np.histogram2d(np.arange(size), ids, bins=bins)[0]
    expected = size / bins**2
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = (bins - 1) ** 2
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5
    steps = np.diff(ids)
    assert abs(float(np.corrcoef(ids[:-1], ids[1:])[0, 1])) < 0.02
    assert len(np.unique(steps)) > size // 3


def test_a_trillion_samples_need_no_table() -> None:
    size = 10**12 + 7
    ids = SampleOrder(size, seed=5).sample_ids(size - 500, 1000)
    assert ids.min() >= 0
    assert ids.max() < size
    assert len(np.unique(ids[:500])) == len(np.unique(ids[500:])) == 500


def test_the_order_is_the_same_on_every_machine() -> None:
    assert SampleOrder(10, seed=0).sample_ids(0, 10).tolist() == FIRST_TEN


def test_number_of_samples() -> None:
    assert num_samples(9, 4) == 2
    assert num_samples(8, 4) == 1
    assert num_samples(5, 4) == 1
    with pytest.raises(DataError, match="4 tokens hold no window of context"):
        num_samples(4, 4)


FIRST_TEN = [0, 4, 8, 9, 1, 7, 6, 5, 2, 3]
