"""The validation loss against one window after the other, where the samples do not divide over ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.reader import open_split
from deeploop_model import DeepLoopModel
from pretrain.config_file import check_config
from pretrain.ds_config import load_ds_config
from pretrain.engine import build_engine
from pretrain.ranks import Ranks, process_group
from pretrain.validation import validation_loss
from tests.support.ranks import run_ranks
from tests.support.runs import CONTEXT, CPU_CONFIG, small_dataset, small_tree

WINDOWS = 7  # of the 8 that the split holds; over 2 ranks x micro-batch 2 the last pass has one empty place


def losses(out: Path, data: Path) -> list[float]:
    """Over 7 windows and over all, then the mean of the losses of single windows for both."""
    config = check_config(small_tree(out, data, micro_batch_size=2), "test")
    ranks = Ranks.from_environment()
    split = open_split(data, "validation")
    with process_group(ranks):
        engine = build_engine(DeepLoopModel(config.model), config, load_ds_config(CPU_CONFIG, config, ranks.world_size))
        result = []
        for wanted in (WINDOWS, 100):
            train = dataclasses.replace(config.train, validation_samples=wanted)
            result.append(validation_loss(engine, split, dataclasses.replace(config, train=train), ranks))
        assert engine.module.training
        with torch.no_grad():
            single = []
            for start in range(8):
                window = torch.from_numpy(split.windows(np.array([start * CONTEXT]), CONTEXT + 1))
                single.append(engine.module(window[:, :-1], window[:, 1:]).loss.item())
    chosen = [int(place * 8 / WINDOWS) for place in range(WINDOWS)]
    return [*result, float(np.mean([single[i] for i in chosen])), float(np.mean(single))]


def test_mean_over_windows_whatever_the_ranks(tmp_path: Path) -> None:
    data = small_dataset(tmp_path / "data", validation_tokens=8 * CONTEXT + 1)
    for result in run_ranks(2, losses, tmp_path / "out", data, folder=tmp_path):
        some, everything, expected_some, expected_everything = result.value
        assert some == pytest.approx(expected_some, rel=1e-4)
        assert everything == pytest.approx(expected_everything, rel=1e-4)
        assert some != everything
