"""Times of steps and of collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from pretrain.monitor.collective_times import timed_collectives
from pretrain.monitor.step_times import StepTimes
from pretrain.ranks import Ranks, process_group
from tests.support.ranks import run_ranks


def test_parts_are_means_over_steps_and_work_beside_is_no_part_of_a_step() -> None:
    times = StepTimes(torch.device("cpu"))
    begun = time.perf_counter()

    for _ in range(2):
        assert list(times.each([1, 2, 3])) == [1, 2, 3]
        with times.of("forward"):
            time.sleep(0.05)
    with times.beside("validation"):
        time.sleep(0.2)
    total = time.perf_counter() - begun
    spent = times.take(2)
    assert spent.parts.keys() == {"data", "forward", "validation"}
    assert spent.parts["forward"] >= 0.05
    assert spent.parts["validation"] >= 0.1
    assert 0.05 <= spent.step <= total / 2 - 0.1 + 0.01
    times.take(1)
    assert times.take(1).parts == {}


def test_making_items_counts_as_data() -> None:
    times = StepTimes(torch.device("cpu"))

    def slowly() -> Iterator[int]:
        time.sleep(0.05)
        yield 1

    assert list(times.each(slowly())) == [1]
    assert times.take(1).parts["data"] >= 0.05


def times_of_reductions() -> tuple[float, float, int, int]:
    """Ten collectives in which rank 0 waits for rank 1, then a single one: the ten's seconds by the clock outside and
    inside, and both numbers."""
    import deepspeed.comm as dist

    ranks, tensor = Ranks.from_environment(), torch.ones(4)
    with process_group(ranks):
        dist.all_reduce(tensor)
        begun = time.perf_counter()
        with timed_collectives() as slow:
            for _ in range(10):
                time.sleep(0.02 * ranks.rank)
                dist.all_reduce(tensor)
        outside = time.perf_counter() - begun
        dist.all_reduce(tensor)
        with timed_collectives() as single:
            dist.all_reduce(tensor)
    return outside, slow.seconds, slow.count, single.count


def test_collectives_are_timed_one_by_one_inside_only(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(2, times_of_reductions, folder=tmp_path)):
        outside, inside, count, single = result.value
        assert (count, single) == (10, 1)
        assert inside <= outside
        if rank == 0:
            assert inside >= 0.15  # of ten waits of 20 ms, less what rank 0 comes late
