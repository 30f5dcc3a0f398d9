"""Which recompute policy a run takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.config_file import load_config
from pretrain.errors import ConfigError
from pretrain.recompute import chosen_recompute
from tests.support.runs import small_tree, write_tree


def test_auto_takes_the_cheapest_that_fits_the_most_rounds(dataset: Path, tmp_path: Path) -> None:
    file = write_tree(tmp_path / "run.yaml", small_tree(tmp_path / "out", dataset))
    assert chosen_recompute(load_config(file)) == ("round", None)
    auto = ["train.recompute=auto", "model.num_rounds=40", "model.d_model=64"]
    policy, reason = chosen_recompute(load_config(file, [*auto, "train.activation_gib=1"]))
    assert policy == "none"
    assert reason is not None
    assert reason.startswith("recompute: none, the cheapest that fits 1,024 MiB: predicted ")
    small = chosen_recompute(load_config(file, [*auto, "train.activation_gib=0.002"]))[0]
    assert small not in ("none", "selective")
    few = ["train.rounds={distribution: uniform, low: 1, high: 2}", "train.activation_gib=0.002"]
    assert chosen_recompute(load_config(file, [*auto, *few]))[0] == "none"
    truncated = ["train.backprop_rounds=2", "model.injection=add"]
    for other, key in (
        (truncated, "train.backprop_rounds"), (["train.round_loss=linear"], "train.round_loss"),
        (["data.separate_documents=true"], "data.separate_documents"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"{key}: its memory is not predicted by train\.recompute auto"):
            load_config(file, [*auto, "train.activation_gib=1", *other])
    with pytest.raises(ConfigError, match=r"train\.recompute: nothing fits 0 MiB: "):
        load_config(file, [*auto, "train.activation_gib=1e-5"])
    with pytest.raises(ConfigError, match=r"train.rounds: recompute auto needs to know the most rounds .* set high"):
        load_config(file, [*auto, "train.activation_gib=1", "train.rounds={distribution: poisson_lognormal, mean: 4}"])


def test_selective_and_compiled_blocks_exclude_each_other(dataset: Path, tmp_path: Path) -> None:
    """Compiled code writes into what selective recomputation keeps, which PyTorch refuses in the backward pass."""
    file = write_tree(tmp_path / "run.yaml", small_tree(tmp_path / "out", dataset))
    with pytest.raises(ConfigError, match=r"train\.recompute: selective does not go with train\.compile"):
        load_config(file, ["train.recompute=selective", "train.compile=true"])
    auto = ["train.recompute=auto", "model.num_rounds=40", "model.d_model=64"]
    budgets = [f"train.activation_gib={mib / 1024}" for mib in range(2, 60)]

    def chosen(*overrides: str) -> set[str]:
        return {chosen_recompute(load_config(file, [*auto, budget, *overrides]))[0] for budget in budgets}

    assert "selective" in chosen()
    assert "selective" not in chosen("train.compile=true")
