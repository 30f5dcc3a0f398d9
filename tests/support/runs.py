"""Small runs for tests: a dataset, a configuration, and what a finished run left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from pretrain.run import main
from tests.support.datasets import write_dataset

REPOSITORY = Path(__file__).resolve().parents[2]
DS_CONFIGS = REPOSITORY / "ds_configs"
CPU_CONFIG = DS_CONFIGS / "zero2_bf16_cpu.json"
VOCAB = 61
CONTEXT = 16
MEASURED_BY_THE_CLOCK = ("tokens_per_second", "speed", "time", "memory")


def small_dataset(folder: Path, train_tokens: int = 5000, validation_tokens: int = 100) -> Path:
    """Tokens with structure to learn: each follows from the one before it, with some noise."""
    generator = np.random.default_rng(0)

    def stream(length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        steps = generator.choice([1, 2, 7], size=length, p=[0.7, 0.2, 0.1])
        return (np.cumsum(steps) % VOCAB).astype(np.int64)

    write_dataset(
        folder, {"train": [stream(train_tokens)], "validation": [stream(validation_tokens)]}, vocab_size=VOCAB
    )
    return folder


def small_tree(out: Path, data: Path, **train: Any) -> dict[str, Any]:
    """The YAML of a run with K = 2, R = 2 on `small_dataset`."""
    return {
        "out": str(out),
        "data": {"path": str(data)},
        "model": {"num_blocks": 2, "num_rounds": 2, "d_model": 32, "num_heads": 2, "context_length": CONTEXT},
        "train": {"steps": 20, "global_batch_size": 8, "micro_batch_size": 4, "validate_every": 10, **train},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"every": 10},
        "monitor": {"log_every": 1, "sample_tokens": 0, "loop_health_every": 0},
    }


def write_tree(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def run_main(config: Path, *overrides: str, ds_config: Path = CPU_CONFIG) -> int:
    """The command line of run.py inside this process; its exit status."""
    return main(["--config", str(config), "--ds_config", str(ds_config), *overrides])


def metrics(out: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without what time and memory decide, and without restarts."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key.split("/")[0] not in MEASURED_BY_THE_CLOCK}
        for line in lines
        if line.get("event") != "restart"
    ]


def optimizer_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """fp32 masters and Adam moments of every rank, by file and place."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*optim_states.pt")):
        state = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
        for index, master in enumerate(state["single_partition_of_fp32_groups"]):
            tensors[f"{file.name}/master/{index}"] = master
        for index, moments in state["base_optimizer_state"]["state"].items():
            tensors |= {f"{file.name}/{name}/{index}": value for name, value in moments.items()}
    return tensors
