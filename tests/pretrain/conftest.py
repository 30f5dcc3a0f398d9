"""One small dataset for all tests of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import small_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, default=30, help="faults in the soak test")
