"""Trained runs, their exports, and `transformers` in a process without this project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pretrain.export.__main__ import main as export
from tests.support.datasets import write_text_dataset
from tests.support.ranks import run_ranks
from tests.support.runs import CPU_CONFIG, run_main, small_tree, write_tree

LOADER = Path(__file__).with_name("load_exported.py")


def run_under(config: Path, ds_config: Path) -> int:
    return run_main(config, ds_config=ds_config)


def train(
    folder: Path, data: Path, model: dict[str, Any], *, ds_config: Path = CPU_CONFIG, steps: int = 4, ranks: int = 2
) -> Path:
    """A finished run in `folder`/out."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = small_tree(folder / "out", data, steps=steps, validate_every=steps)
    tree["model"] |= model
    config = write_tree(folder / "run.yaml", tree)
    assert [r.value for r in run_ranks(ranks, run_under, config, ds_config, folder=folder)] == [0] * ranks
    return folder / "out"


def train_on_text(folder: Path) -> Path:
    """A run on text with a prelude, grouped queries and injection; its dataset lies beside it in `folder`/data."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text_dataset(folder / "data")
    model = {"context_length": 48, "num_prelude_blocks": 1, "num_kv_heads": 1, "injection": "concat-linear"}
    return train(folder, folder / "data", model, steps=12)


def exported(out: Path, checkpoint: Path, *options: str, to: str = "hf") -> Path:
    """What the export command wrote."""
    assert export(["--checkpoint", str(checkpoint), "--to", to, str(out), *options]) == 0
    return out


def load_with_transformers(
    work: Path, folders: Sequence[Path], requests: dict[str, Any], tokens_BT: torch.Tensor
) -> dict[str, dict[str, Any]]:
    """Results of `load_exported.py` by name of folder; its working folder and its path hold nothing of the project."""
    work.mkdir()
    (work / "requests.json").write_text(json.dumps(requests))
    torch.save(tokens_BT, work / "tokens.pt")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, LOADER, work, *folders], cwd=work, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return {folder.name: torch.load(work / f"{folder.name}.pt", weights_only=False) for folder in folders}
