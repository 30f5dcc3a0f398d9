"""A run on a mixture: what it trains and validates on, and what the datasets must agree in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_prep.errors import DataError
from data_prep.manifest import load_manifest
from pretrain.config_file import as_tree, check_config, load_config
from pretrain.errors import ConfigError
from tests.support.datasets import write_dataset
from tests.support.ranks import run_ranks
from tests.support.runs import CONTEXT, metrics, run_main, small_dataset, small_tree, write_tree


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two datasets of one vocabulary: tokens that follow a rule, and one token only."""
    folder = tmp_path_factory.mktemp("sources")
    ones = np.ones(40 * CONTEXT + 1, dtype=np.int64)
    write_dataset(folder / "ones", {"train": [ones], "validation": [ones]}, vocab_size=61)
    return {"rule": small_dataset(folder / "rule"), "ones": folder / "ones"}


def test_a_run_on_a_mixture(sources: dict[str, Path], tmp_path: Path) -> None:
    """Metrics and TensorBoard have the weighted validation loss and each source's, and epochs of each source."""
    tree = small_tree(tmp_path / "out", sources["rule"], steps=20, validate_every=20)
    tree["data"]["path"] = [{"path": str(sources["rule"]), "weight": 1}, {"path": str(sources["ones"]), "weight": 3}]
    config = write_tree(tmp_path / "run.yaml", tree)
    assert [r.value for r in run_ranks(2, run_main, config, folder=tmp_path)] == [0, 0]
    *training, validation = metrics(tmp_path / "out")
    assert [line["epoch/ones"] for line in training] == pytest.approx([6 * step / 40 for step in range(1, 21)])
    assert training[-1]["epoch/rule"] == pytest.approx(40 / (4999 // CONTEXT))
    rule, ones = validation["val_loss/rule"], validation["val_loss/ones"]
    assert ones < 1 < rule - 1  # the constant is learned at once
    assert validation["val_loss"] == pytest.approx(0.25 * rule + 0.75 * ones)
    events = EventAccumulator(str(tmp_path / "out/tensorboard"))
    events.Reload()
    assert {"validation/loss", "validation/loss/rule", "train/epoch/ones"} <= {*events.Tags()["scalars"]}
    resolved = load_config(tmp_path / "out/config.yaml")
    assert [source.weight for source in resolved.data.sources] == [1, 3]
    assert check_config(as_tree(resolved), "again") == resolved


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], "data.path: [] must be"),
        ([{"path": "RULE", "weigth": 1}], "data.path.0.weigth: unknown key; did you mean 'weight'?"),
        ([{"path": "RULE"}], "data.path.0.weight: is required and missing"),
        ([{"path": "RULE", "weight": 0}], "data.path.0.weight: 0 must be greater than 0"),
        (3, "data.path: 3 must be"),
    ],
)
def test_lists_that_are_no_mixture(path: object, message: str, sources: dict[str, Path], tmp_path: Path) -> None:
    tree = small_tree(tmp_path / "out", sources["rule"])
    tree["data"]["path"] = path
    with pytest.raises(ConfigError) as caught:
        load_config(write_tree(tmp_path / "run.yaml", tree))
    assert str(caught.value).startswith(f"{tmp_path / 'run.yaml'}: {message}")
    assert "\n" not in str(caught.value)


def test_datasets_that_do_not_go_together(sources: dict[str, Path], tmp_path: Path) -> None:
    other = small_dataset(tmp_path / "other")
    manifest = load_manifest(other)
    tree = small_tree(tmp_path / "out", sources["rule"])
    tree["data"] = {
        "path": [{"path": str(sources["rule"]), "weight": 1}, {"path": str(other), "weight": 1}],
        "separate_documents": True,
    }
    config = write_tree(tmp_path / "run.yaml", tree)
    assert load_config(config).data.separate_documents
    bos = dataclasses.replace(manifest.tokenizer, bos_id=1)
    dataclasses.replace(manifest, tokenizer=bos, document_rule="bos text eos").save(other)
    with pytest.raises(ConfigError, match="separate_documents: true, but the data has documents that begin with diff"):
        load_config(config)
    without = dataclasses.replace(manifest.tokenizer, eos_id=None)
    dataclasses.replace(manifest, tokenizer=without).save(other)
    with pytest.raises(ConfigError, match="separate_documents: true, but the data has no token between documents"):
        load_config(config)
    dataclasses.replace(manifest, tokenizer=dataclasses.replace(manifest.tokenizer, sha256="a")).save(other)
    with pytest.raises(DataError, match="other: made with another tokenizer than "):
        load_config(config)
