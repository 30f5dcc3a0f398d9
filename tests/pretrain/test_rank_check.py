"""A weight that is not the same on all ranks is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pretrain import run
from pretrain.engine import train_step
from pretrain.exit_codes import Exit
from tests.support.ranks import run_ranks
from tests.support.runs import run_main, small_tree, write_tree

SPOILT = "blocks.1.feed_forward.up.weight"


def flipping_main(config: Path, rank: int | None) -> int:
    """A run in which one bit of one weight flips on `rank` after step 6."""
    done = 0

    def step(engine: Any, *args: Any) -> torch.Tensor:
        nonlocal done
        loss = train_step(engine, *args)
        done += 1
        if done == 6 and torch.distributed.get_rank() == rank:
            weight = dict(engine.module.named_parameters())[SPOILT]
            weight.data.view(torch.int16)[3, 5] ^= 1
        return loss

    with patch.object(run, "train_step", step):
        return run_main(config)


def test_one_flipped_bit_on_one_rank_stops_the_run(dataset: Path, tmp_path: Path) -> None:
    values = small_tree(tmp_path / "out", dataset, steps=8, validate_every=0)
    config = write_tree(tmp_path / "run.yaml", {**values, "recovery": {"compare_ranks_every": 2}})
    results = run_ranks(2, flipping_main, config, 1, folder=tmp_path)
    assert [r.value for r in results] == [Exit.RANKS_DIFFER] * 2
    assert all(f"after step 6, {SPOILT} is not the same on all ranks: no majority" in r.stderr for r in results)
    healthy = write_tree(tmp_path / "healthy.yaml", {**values, "recovery": {"compare_ranks_every": 1}})
    assert [r.value for r in run_ranks(2, flipping_main, healthy, None, folder=tmp_path)] == [0, 0]
