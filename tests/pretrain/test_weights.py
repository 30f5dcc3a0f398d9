"""A run with drawn rounds, truncation and supervised rounds on two ranks, and the model read from its checkpoint."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from deeploop_model import DeepLoopModel
from deeploop_model.flops import train_flops
from pretrain import run
from pretrain.config_file import load_config
from pretrain.engine import parameter_groups, train_step
from pretrain.errors import CheckpointError
from pretrain.rounds import UniformRounds, rounds_of_step
from pretrain.weights import find_checkpoint, load_model
from tests.support.ranks import run_ranks
from tests.support.runs import (
    CONTEXT,
    CPU_CONFIG,
    DS_CONFIGS,
    metrics,
    optimizer_tensors,
    run_main,
    small_tree,
    write_tree,
)


def rounds_of_this_rank(config: Path, *overrides: str) -> list[int]:
    """Runs to the end; the rounds that this rank ran in each step."""
    seen: list[int] = []

    def noting_step(engine: Any, batches: Any, num_rounds: int, *rest: Any) -> torch.Tensor:
        seen.append(num_rounds)
        return train_step(engine, batches, num_rounds, *rest)

    with patch.object(run, "train_step", noting_step):
        assert run_main(config, *overrides) == 0
    return seen


def test_drawn_rounds_are_equal_on_ranks_and_after_resume_and_weights_read_back(dataset: Path, tmp_path: Path) -> None:
    rounds = {"distribution": "uniform", "low": 1, "high": 4}
    options: dict[str, Any] = {"rounds": rounds, "backprop_rounds": 2, "round_loss": "linear", "frozen": ["blocks.0.*"]}
    tree = small_tree(tmp_path / "out", dataset, steps=6, validate_every=0, **options)
    tree["model"]["injection"] = "add"
    tree["checkpoint"]["every"] = 3
    config = write_tree(tmp_path / "run.yaml", tree)
    expected = [rounds_of_step(UniformRounds("uniform", 1, 4), 2, 0, step) for step in range(6)]
    assert len(set(expected)) > 2
    for result in run_ranks(2, rounds_of_this_rank, config, folder=tmp_path):
        assert result.value == expected
    assert [line["rounds"] for line in metrics(tmp_path / "out") if "loss" in line] == expected
    model_config = load_config(config).model
    step_flops = [8 * CONTEXT * train_flops(model_config, r, backprop_rounds=2, round_loss="linear") for r in expected]
    assert [line["flops"] for line in metrics(tmp_path / "out") if "loss" in line] == list(
        itertools.accumulate(step_flops)
    )
    third = tmp_path / "out/checkpoints/step_00000003"
    for result in run_ranks(2, rounds_of_this_rank, config, "--resume", str(third), folder=tmp_path):
        assert result.value == expected[3:]

    folder = find_checkpoint(tmp_path / "out")
    assert folder == tmp_path / "out/checkpoints/step_00000006"
    model = load_model(folder)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith("blocks.0."))
    masters = optimizer_tensors(folder)
    for index, group in enumerate(parameter_groups(model, 0.0)):
        flat = torch.cat([weight.detach().flatten() for weight in group["params"]])
        parts = [tensor for name, tensor in sorted(masters.items()) if name.endswith(f"/master/{index}")]
        assert torch.equal(torch.cat(parts)[: len(flat)], flat)
    with pytest.raises(CheckpointError, match="is not a checkpoint of this project"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["zero1_bf16", "zero3_bf16", "zero2_bf16_offload"])
def test_master_weights_of_every_stage(name: str, dataset: Path, tmp_path: Path) -> None:
    """They moved as those of the ZeRO-2 run did, up to bf16 noise; frozen ones are what they were."""
    tree = small_tree(tmp_path / "out", dataset, steps=3, validate_every=0, frozen=["blocks.0.*"])
    config = write_tree(tmp_path / "run.yaml", tree)
    found = []
    for ds_config in (DS_CONFIGS / f"{name}.json", CPU_CONFIG):
        out = tmp_path / ds_config.stem
        results = run_ranks(2, run_under, config, ds_config, f"out={out}", folder=tmp_path)
        assert [result.value for result in results] == [0, 0]
        found.append(load_model(find_checkpoint(out)))
    ours, reference = (model.state_dict() for model in found)
    initial = DeepLoopModel(found[0].config, seed=0).state_dict()
    for weight_name, weight in ours.items():
        assert weight.dtype == torch.float32
        if weight_name.startswith("blocks.0."):
            assert torch.equal(weight, initial[weight_name].bfloat16().float()), weight_name
        else:
            change = (reference[weight_name] - initial[weight_name]).norm()
            assert change > 0
            assert (weight - reference[weight_name]).norm() < 0.3 * change, weight_name


def run_under(config: Path, ds_config: Path, *overrides: str) -> int:
    return run_main(config, *overrides, ds_config=ds_config)


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of three steps."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_tree(folder / "run.yaml", small_tree(folder / "out", dataset, steps=3, validate_every=0))
    assert run_ranks(1, run_main, config, folder=folder)[0].value == 0
    return folder / "out"


def test_a_new_part_is_trained_on_the_frozen_weights_of_an_earlier_run(
    trained: Path, dataset: Path, tmp_path: Path
) -> None:
    """Continual learning: new coda blocks learn behind the blocks of the earlier run, which stay as they are."""
    options: dict[str, Any] = {"initial_weights": str(trained), "trainable": ["coda.*"], "validate_every": 0}
    tree = small_tree(tmp_path / "out", dataset, steps=4, **options)
    tree["model"]["num_coda_blocks"] = 1
    config = write_tree(tmp_path / "run.yaml", tree)
    tree["checkpoint"]["every"] = 2
    results = run_ranks(2, run_main, config, folder=tmp_path)
    assert [result.value for result in results] == [0, 0]
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("initial weights from"))
    assert str(trained / "checkpoints/step_00000003") in line
    assert "not there and drawn anew: coda.0.attention.qkv.weight" in line
    assert line.endswith("they were trained at alpha 2.828 and this run has 3.162: model.residual_depth can keep it")

    old, new = (load_model(find_checkpoint(out)).state_dict() for out in (trained, tmp_path / "out"))
    initial = DeepLoopModel(load_model(find_checkpoint(tmp_path / "out")).config, seed=0).state_dict()
    for name, weight in new.items():
        if name.startswith("coda."):
            assert not torch.equal(weight, initial[name]), name
        else:
            assert torch.equal(weight, old[name].bfloat16().float()), name  # frozen weights are stored in bf16
    coda = sum(weight.numel() for name, weight in new.items() if name.startswith("coda."))
    states = optimizer_tensors(find_checkpoint(tmp_path / "out"))
    kept = sum(tensor.numel() for name, tensor in states.items() if "/master/" in name or "/exp_avg/" in name)
    assert 2 * coda <= kept <= 2 * coda + 32  # masters and first moments; groups are padded to the ranks


def test_damaged_files_are_named_and_not_used(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    folder = find_checkpoint(out)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        middle = len(whole) // 2
        file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(CheckpointError, match=rf"{file.name}: (is damaged: .*; give the path|cannot)"):
            load_model(folder)
        file.write_bytes(whole)
    load_model(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        load_model(folder)


@pytest.mark.parametrize(
    ("path", "overrides", "message"),
    [
        ("", ["model.d_model=64"], r"embedding.weight is of shape \[64, 32\] there and of shape \[64, 64\] in this"),
        ("", ["model.num_heads=4"], "model.num_heads is 2 there and 4 in this run"),
        ("", ["model.residual=post_ln"], "model.residual is 'deeploop' there and 'post_ln' in this run"),
        ("", ["model.num_blocks=1"], r"blocks.1.attention.qkv.weight is of shape \[96, 32\] there and absent in this"),
        ("nowhere", [], "train.initial_weights: .*nowhere: no such folder; give a run folder or a checkpoint"),
        ("logs", [], "train.initial_weights: .*logs: .*"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(
    path: str, overrides: list[str], message: str, trained: Path, dataset: Path, tmp_path: Path
) -> None:
    tree = small_tree(tmp_path / "out", dataset, steps=3, initial_weights=str(trained / path))
    config = write_tree(tmp_path / "run.yaml", tree)
    (result,) = run_ranks(1, run_main, config, *overrides, folder=tmp_path)
    assert result.value == 2
    assert re.fullmatch(f"error: .*{message}.*\n", result.stderr.splitlines(keepends=True)[-1])
    assert not (tmp_path / "out").exists()
