"""Loop health of a run: over ranks and ZeRO stages against one process, and what counts as a collapse."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.reader import open_split
from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.loop_health import LoopHealth, health_of
from pretrain.config import MonitorConfig, RunConfig
from pretrain.config_file import check_config
from pretrain.ds_config import load_ds_config
from pretrain.engine import build_engine
from pretrain.monitor.loop_monitor import LoopMonitor, collapses
from pretrain.ranks import Ranks, process_group
from pretrain.run_data import open_data
from tests.support.ranks import run_ranks
from tests.support.runs import CONTEXT, DS_CONFIGS, small_dataset, small_tree

STAGES = ("zero1_bf16", "zero2_bf16_cpu", "zero3_bf16")
FIELDS = {"num_prelude_blocks": 1, "num_coda_blocks": 1, "injection": "add", "num_kv_heads": 1, "qk_norm": True}


def config_of(out: Path, data: Path) -> RunConfig:
    tree: dict[str, Any] = small_tree(out, data, micro_batch_size=2)
    tree["model"] |= FIELDS
    tree["monitor"] |= {"loop_health_sequences": 2}
    return check_config(tree, "test")


def measured_under(out: Path, data: Path, names: tuple[str, ...]) -> list[LoopHealth]:
    """Under each of our DeepSpeed files; of validation windows, then of training windows."""
    config, ranks, found = config_of(out, data), Ranks.from_environment(), []
    with process_group(ranks):
        for name in names:
            ds_config = load_ds_config(DS_CONFIGS / f"{name}.json", config, ranks.world_size)
            engine = build_engine(DeepLoopModel(config.model, recompute="round"), config, ds_config)
            opened = open_data(config)
            found.append(LoopMonitor(engine, opened, config, ranks).measure())
            found.append(LoopMonitor(engine, dataclasses.replace(opened, validation={}), config, ranks).measure())
            assert engine.module.training
    return found


def assert_near(found: LoopHealth, expected: LoopHealth, rel: float) -> None:
    for name, values in {**expected.per_block, **expected.per_round}.items():
        both = {**found.per_block, **found.per_round}
        np.testing.assert_allclose(np.array(both[name]), np.array(values), rtol=rel, atol=1e-4, err_msg=name)


def test_two_ranks_under_every_zero_stage_tell_what_one_process_does(tmp_path: Path) -> None:
    data = small_dataset(tmp_path / "data", validation_tokens=8 * CONTEXT + 1)
    config = config_of(tmp_path / "out", data)
    model = DeepLoopModel(config.model).bfloat16()

    def expected(windows: torch.Tensor) -> LoopHealth:
        sums = model(windows[:, :-1], windows[:, 1:], observed=True).loop
        assert sums is not None
        return health_of(sums)

    split = open_split(data, "validation")
    validation = expected(torch.from_numpy(split.windows(np.arange(0, 8, 2) * CONTEXT, CONTEXT + 1)))
    training = expected(torch.from_numpy(open_data(config).training.samples(np.arange(4))))
    results = run_ranks(2, measured_under, tmp_path / "out", data, STAGES, folder=tmp_path)
    for result in results:
        assert len(result.value) == 2 * len(STAGES)
        for index, found in enumerate(result.value):
            assert_near(found, validation if index % 2 == 0 else training, rel=2e-3)
    assert abs(validation.per_round["loss"][0] - training.per_round["loss"][0]) > 1e-2


def test_collapse_names_the_worst_place_and_the_key() -> None:
    nan = math.nan
    health = LoopHealth(
        {
            "state_change": [[nan, nan], [0.2, 0.1]],
            "attention_entropy": [[1.5, 1.0], [0.02, 0.01]],
        },
        {},
    )
    config = MonitorConfig()
    assert (config.collapse_entropy, config.collapse_change) == (0.05, 1e-5)
    assert collapses(health, config) == {
        "attention_entropy": "attention looks at one token: attention_entropy 0.01 in round 2, block 1 is under "
        "monitor.collapse_entropy 0.05 (2 of 4 places are)"
    }
    strict = dataclasses.replace(config, collapse_entropy=0.0, collapse_change=0.15)
    assert collapses(health, strict) == {
        "state_change": "rounds change nothing: state_change 0.1 in round 2, block 1 is under "
        "monitor.collapse_change 0.15 (1 of 4 places are)"
    }
    alone = LoopHealth({"state_change": [[nan]], "attention_entropy": [[1.0]]}, {})
    assert collapses(alone, strict) == {}


@pytest.mark.parametrize("rounds", [1, 3])
def test_untrained_loops_are_no_collapse(rounds: int) -> None:
    """DeepLoop's branches start small, yet above the limits, even at N = 144."""
    config = DeepLoopConfig(num_blocks=48, num_rounds=rounds, d_model=32, num_heads=2, vocab_size=61, context_length=16)
    tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    sums = DeepLoopModel(config)(tokens[:, :-1], tokens[:, 1:], observed=True).loop
    assert sums is not None
    assert collapses(health_of(sums), MonitorConfig()) == {}
