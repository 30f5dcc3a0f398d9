"""The YAML files that come with the project: each loads as it is, and each trains when made small."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.config import RunConfig
from pretrain.config_file import load_config
from pretrain.rounds import PoissonLognormalRounds
from tests.support.ranks import run_ranks
from tests.support.runs import REPOSITORY, metrics, run_main, small_dataset

CONFIGS = REPOSITORY / "pretrain/configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
SMALLER = [
    "model.d_model=32", "model.num_heads=2", "model.d_ff=64", "model.context_length=16", "train.steps=12",
    "train.global_batch_size=4", "train.micro_batch_size=2", "train.validate_every=0", "schedule.warmup_steps=2",
    "optimizer.lr=5e-3", "monitor.log_every=1", "monitor.sample_tokens=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def long_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One window of the longest context for training and one for validation."""
    return small_dataset(tmp_path_factory.mktemp("long") / "data", train_tokens=5000, validation_tokens=5000)


def recipe(name: str, data: Path) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", [f"data.path={data}"])


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_valid_as_it_is(name: str, long_dataset: Path) -> None:
    config = recipe(name, long_dataset)
    assert config.train.recompute == "round"
    assert config.out == f"runs/{name.replace('_', '-')}"


def test_values_that_the_recipes_are_known_by(long_dataset: Path) -> None:
    small = recipe("small", long_dataset)
    assert (small.model.num_blocks, small.model.num_rounds, small.model.residual) == (2, 4, "deeploop")
    medium = recipe("gpt2_medium", long_dataset)
    assert (medium.model.num_blocks, medium.model.num_rounds, medium.train.global_batch_size) == (24, 3, 480)
    tutorial = recipe("looped_transformer", long_dataset)
    assert (tutorial.optimizer.lr, tutorial.schedule.warmup_steps) == (3e-4, 2000)
    assert tutorial.optimizer.gradient_clipping == 1.0
    huginn = recipe("huginn_like", long_dataset)
    assert huginn.train.rounds == PoissonLognormalRounds("poisson_lognormal", mean=32, sigma=0.5, high=96)
    assert (huginn.train.backprop_rounds, huginn.model.injection) == (8, "concat-linear")


@pytest.mark.parametrize("name", sorted({*NAMES} - {"small", "gpt2_medium", "continual"}))
def test_literature_recipes_train_on_two_ranks(name: str, dataset: Path, tmp_path: Path) -> None:
    overrides = [f"out={tmp_path / 'out'}", f"data.path={dataset}", *SMALLER]
    if name == "looped_transformer":
        overrides += ["model.num_rounds=16", "optimizer.gradient_clipping=1.5"]
    results = run_ranks(2, run_main, CONFIGS / f"{name}.yaml", *overrides, folder=tmp_path)
    assert [result.value for result in results] == [0, 0]
    losses = [line["loss"] for line in metrics(tmp_path / "out") if "loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.05
