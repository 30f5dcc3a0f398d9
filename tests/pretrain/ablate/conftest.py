"""A base run and study files on the dataset that the tests of the run share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import CPU_CONFIG, small_dataset, small_tree, write_tree

StudyWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def study_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_dataset(tmp_path_factory.mktemp("study-data") / "dataset", validation_tokens=600)


@pytest.fixture
def study_tree(tmp_path: Path, study_data: Path) -> dict[str, Any]:
    """Two rules at R = 1 and 2: four runs."""
    base = write_tree(tmp_path / "base.yaml", small_tree(tmp_path / "unused", study_data))
    return {
        "out": str(tmp_path / "study"),
        "base": str(base),
        "ds_config": str(CPU_CONFIG),
        "grids": {"rounds": {"axes": {"residual": ["deeploop", "deepnorm"], "num_rounds": [1, 2], "seed": [0]}}},
    }
