"""How ranks part: one that ends in an error waits for nobody for long, whatever it and the others have under way."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from pretrain.errors import PretrainError
from pretrain.exit_codes import Exit
from pretrain.ranks import ENDING_SECONDS, Ranks, end_process, process_group
from tests.support.ranks import exit_statuses

PATIENCE = 200.0


def main_with_a_mistake() -> int:
    """Rank 0 fails with one collective under way while rank 1 waits in another one: neither comes to an end."""
    ranks = Ranks.from_environment()
    try:
        with process_group(ranks, timeout=PATIENCE):
            first, second = dist.new_group(), dist.new_group()
            dist.barrier()
            if ranks.is_main:
                dist.all_reduce(torch.ones(10), group=first, async_op=True)
                raise PretrainError("a mistake")
            dist.all_reduce(torch.ones(10), group=second)
    except PretrainError as error:
        print(error)
        return 2
    return 0


def failing_process() -> int:
    end_process(main_with_a_mistake)


def test_a_rank_with_an_error_and_its_peers_leave_in_bounded_time(tmp_path: Path) -> None:
    start = time.monotonic()
    assert exit_statuses(2, failing_process, folder=tmp_path, timeout=0.8 * PATIENCE) == [2, 1]
    print(f"\nboth ranks had left in {time.monotonic() - start:.1f} s")
    assert time.monotonic() - start < 0.5 * PATIENCE
    assert (tmp_path / "rank0.out").read_text().endswith("a mistake\n")
    assert "Connection closed by peer" in (tmp_path / "rank1.err").read_text()
    assert ENDING_SECONDS < 0.1 * PATIENCE


def ending_process(status: int) -> int:
    end_process(lambda: status if status != Exit.CRASH else 1 // 0)


def test_statuses_are_handed_on_and_a_crash_leaves_its_traceback(tmp_path: Path) -> None:
    for status in (Exit.USER_ERROR, Exit.RANKS_DIFFER, Exit.CRASH):
        assert exit_statuses(1, ending_process, status, folder=tmp_path) == [status]
    assert "ZeroDivisionError" in (tmp_path / "rank0.err").read_text()
