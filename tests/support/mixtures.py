"""Small datasets to mix, whose tokens tell their source and offset."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.mixture import Mixture, Source
from tests.support.datasets import write_dataset

CONTEXT = 4
SAMPLES = {"a": 50, "b": 20, "c": 7}


def write_sources(root: Path) -> dict[str, Path]:
    """Token t of source number n is 1,000 n + t; three shards each."""
    for number, (name, samples) in enumerate(SAMPLES.items()):
        tokens = 1000 * number + np.arange(samples * CONTEXT + 1)
        write_dataset(root / name, {"train": np.array_split(tokens, 3)})
    return {name: root / name for name in SAMPLES}


def mixture(folders: dict[str, Path], weights: dict[str, float], seed: int = 0) -> Mixture:
    return Mixture([Source(folders[name], weight) for name, weight in weights.items()], "train", CONTEXT, seed)
