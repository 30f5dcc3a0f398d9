"""Frozen weights: which ones the patterns mean, and that nothing touches them under ZeRO-2."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel
from pretrain.config_file import check_config
from pretrain.data_feed import TrainFeed
from pretrain.ds_config import accumulation_steps, load_ds_config
from pretrain.engine import build_engine, parameter_groups, train_step
from pretrain.errors import ConfigError
from pretrain.freezing import freeze
from pretrain.ranks import Ranks, process_group
from pretrain.run_data import open_data
from tests.support.ranks import run_ranks
from tests.support.runs import CPU_CONFIG, small_tree


def small_model() -> DeepLoopModel:
    return DeepLoopModel(DeepLoopConfig(num_blocks=2, d_model=16, num_heads=2, vocab_size=37, tie_embeddings=False))


@pytest.mark.parametrize(
    ("trainable", "frozen", "learning"),
    [
        (["*"], ["*.weight"], None),
        (["*"], ["blocks.*"], {"embedding.weight", "embedding_norm.weight", "head.weight"}),
        (["head.*", "*_norm.weight"], ["blocks.*"], {"embedding_norm.weight", "head.weight"}),
        (["blocks.1.feed_forward.*"], [], {"blocks.1.feed_forward.up.weight", "blocks.1.feed_forward.down.weight"}),
    ],
)
def test_patterns(trainable: list[str], frozen: list[str], learning: set[str] | None) -> None:
    model = small_model()
    if learning is None:
        with pytest.raises(ConfigError, match=r"train.frozen: \['\*.weight'\] leaves nothing of train.trainable"):
            freeze(model, trainable, frozen)
        return
    names = freeze(model, trainable, frozen)
    assert {name for name, w in model.named_parameters() if w.requires_grad} == learning
    assert names == [name for name, _ in model.named_parameters() if name not in learning]
    trained = [w for group in parameter_groups(model, 0.1) for w in group["params"]]
    assert len(trained) == len(learning)


@pytest.mark.parametrize("key", ["trainable", "frozen"])
def test_a_pattern_without_a_weight_is_refused(key: str) -> None:
    patterns = {"trainable": ["*"], "frozen": ["*.up.weight"], key: ["head.*", "block.*"]}
    with pytest.raises(
        ConfigError, match=f"train.{key}: 'block.[*]' names no weight of this model; its weights are emb"
    ):
        freeze(small_model(), **patterns)


class Trained(NamedTuple):
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    frozen: list[str]
    masters: int
    adam_numbers: int


def train_with_frozen_weights(out: Path, data: Path, frozen: list[str]) -> Trained:
    """Three optimizer steps on this rank's part of the batches."""
    config = check_config(small_tree(out, data, frozen=frozen, recompute="round"), "test")
    ranks = Ranks.from_environment()
    with process_group(ranks):
        ds_config = load_ds_config(CPU_CONFIG, config, ranks.world_size)
        model = DeepLoopModel(config.model, seed=1, recompute=config.train.recompute)
        names = freeze(model, config.train.trainable, config.train.frozen)
        engine = build_engine(model, config, ds_config)
        accumulation = accumulation_steps(config, ranks.world_size)
        feed = TrainFeed(open_data(config), config, accumulation, ranks)
        before = {name: w.detach().clone() for name, w in engine.module.named_parameters()}
        for step in range(3):
            train_step(engine, feed.micro_batches(step), 2, config.train)
        after = {name: w.detach().clone() for name, w in engine.module.named_parameters()}
        masters = sum(part.numel() for part in engine.optimizer.single_partition_of_fp32_groups)
        states = engine.optimizer.optimizer.state.values()
        moments = sum(state[name].numel() for state in states for name in ("exp_avg", "exp_avg_sq"))
    return Trained(before, after, names, masters, moments)


@pytest.mark.parametrize("frozen", [["blocks.*"], ["embedding*", "*norm*"]], ids=["blocks", "embedding-and-norms"])
def test_zero2_trains_the_others_and_keeps_nothing_for_the_frozen(
    frozen: list[str], dataset: Path, tmp_path: Path
) -> None:
    results = [
        r.value for r in run_ranks(2, train_with_frozen_weights, tmp_path / "o", dataset, frozen, folder=tmp_path)
    ]
    for trained in results:
        assert trained.frozen
        for name, before in trained.before.items():
            assert torch.equal(before, trained.after[name]) == (name in trained.frozen), name
        assert all(torch.equal(trained.after[name], results[0].after[name]) for name in trained.after)
    learning = sum(w.numel() for name, w in results[0].before.items() if name not in results[0].frozen)
    kept = sum(trained.masters for trained in results)
    assert learning <= kept <= learning + 16  # each group is padded to a multiple of the ranks
    assert sum(trained.adam_numbers for trained in results) == 2 * kept
