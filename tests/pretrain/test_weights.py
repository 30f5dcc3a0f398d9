"""A run with drawn rounds, truncation and supervised rounds on two ranks, and the model read from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pretrain import run
from pretrain.engine import parameter_groups, train_step
from pretrain.errors import CheckpointError
from pretrain.rounds import UniformRounds, rounds_of_step
from pretrain.weights import find_checkpoint, load_model
from tests.support.ranks import run_ranks
from tests.support.runs import metrics, optimizer_tensors, run_main, small_tree, write_tree


def rounds_of_this_rank(config: Path, *overrides: str) -> list[int]:
    """Runs to the end; the rounds that this rank ran in each step."""
    seen: list[int] = []

    def noting_step(engine: Any, batches: Any, num_rounds: int, train: Any) -> torch.Tensor:
        seen.append(num_rounds)
        return train_step(engine, batches, num_rounds, train)

    with patch.object(run, "train_step", noting_step):
        assert run_main(config, *overrides) == 0
    return seen


def test_drawn_rounds_are_equal_on_ranks_and_after_resume_and_weights_read_back(dataset: Path, tmp_path: Path) -> None:
    rounds = {"distribution": "uniform", "low": 1, "high": 4}
    options: dict[str, Any] = {"rounds": rounds, "backprop_rounds": 2, "round_loss": "linear", "frozen": ["blocks.0.*"]}
    tree = small_tree(tmp_path / "out", dataset, steps=6, validate_every=0, **options)
    tree["checkpoint"]["every"] = 3
    config = write_tree(tmp_path / "run.yaml", tree)
    expected = [rounds_of_step(UniformRounds("uniform", 1, 4), 2, 0, step) for step in range(6)]
    assert len(set(expected)) > 2
    for result in run_ranks(2, rounds_of_this_rank, config, folder=tmp_path):
        assert result.value == expected
    assert [line["rounds"] for line in metrics(tmp_path / "out")] == expected
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
