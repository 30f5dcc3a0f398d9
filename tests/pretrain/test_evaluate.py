"""Evaluation against one plain forward pass per window and number of rounds, at any batch size and number of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data_prep.reader import open_split
from pretrain.evaluate import main
from pretrain.weights import find_checkpoint, load_model
from tests.support.datasets import write_dataset
from tests.support.ranks import run_ranks
from tests.support.runs import CONTEXT, VOCAB, run_main, small_dataset, small_tree, write_tree

TOKENS = 11 * CONTEXT + 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run on two ranks beside its dataset; 11 windows for validation."""
    folder = tmp_path_factory.mktemp("trained")
    data = small_dataset(folder / "data", validation_tokens=TOKENS)
    tree = small_tree(folder / "out", data, steps=8, validate_every=0)
    tree["model"] |= {"num_coda_blocks": 1, "injection": "add"}
    config = write_tree(folder / "run.yaml", tree)
    assert [r.value for r in run_ranks(2, run_main, config, folder=folder)] == [0, 0]
    return folder


def evaluated(trained: Path, folder: Path, ranks: int, *options: str) -> list[dict[str, Any]]:
    out = folder / "figures.json"
    arguments = ["--checkpoint", str(trained / "out"), "--data", str(trained / "data"), "--out", str(out), *options]
    results = run_ranks(ranks, main, arguments, folder=folder)
    assert [r.value for r in results] == [0] * ranks
    figures: list[dict[str, Any]] = json.loads(out.read_text())
    assert "context  windows  rounds      loss" in results[0].stdout
    return figures


def plain_losses(trained: Path, rounds: int, windows: list[int], separate: bool = False) -> torch.Tensor:
    """[windows, context] nats, one forward pass of a window alone each."""
    model, split = load_model(find_checkpoint(trained / "out")), open_split(trained / "data", "validation")
    losses = []
    for window in windows:
        tokens = torch.from_numpy(split.windows(np.array([window * CONTEXT]), CONTEXT + 1))
        documents = (tokens[:, :-1] == 0).cumsum(1) if separate else None
        logits = model(tokens[:, :-1], num_rounds=rounds, documents_BT=documents).logits[0]
        losses.append(F.cross_entropy(logits, tokens[0, 1:], reduction="none"))
    return torch.stack(losses).double()


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (1, 8), (2, 4), (3, 2)])
def test_figures_equal_plain_passes_whatever_the_batch_and_the_ranks(
    ranks: int, batch: int, trained: Path, tmp_path: Path
) -> None:
    (figures,) = evaluated(trained, tmp_path, ranks, "--rounds", "1,4,2", "--batch-size", str(batch))
    assert (figures["context"], figures["windows"]) == (CONTEXT, 11)
    assert list(figures["rounds"]) == ["1", "2", "4"]
    for rounds, found in figures["rounds"].items():
        expected = plain_losses(trained, int(rounds), list(range(11)))
        assert found["loss_by_position"] == pytest.approx(expected.mean(0).tolist(), abs=1e-5)
        assert found["loss"] == pytest.approx(float(expected.mean()), abs=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(expected.mean()), rel=1e-5)
        # The dataset says one byte per token.
        assert found["bits_per_byte"] == pytest.approx(float(expected.mean()) / math.log(2), abs=1e-5)


def test_some_windows_separate_documents_and_longer_contexts(trained: Path, tmp_path: Path) -> None:
    (some,) = evaluated(trained, tmp_path, 1, "--windows", "7", "--separate-documents")
    expected = plain_losses(trained, 2, [0, 1, 3, 4, 6, 7, 9], separate=True)
    assert some["rounds"]["2"]["loss"] == pytest.approx(float(expected.mean()), abs=1e-5)
    assert float((expected - plain_losses(trained, 2, [0, 1, 3, 4, 6, 7, 9])).abs().max()) > 1e-3
    short, long = evaluated(trained, tmp_path, 1, "--context", "64,8")
    assert (short["context"], short["windows"]) == (8, (TOKENS - 1) // 8)
    assert (long["context"], long["windows"]) == (64, (TOKENS - 1) // 64)
    assert len(long["rounds"]["2"]["loss_by_position"]) == 64


def test_table_by_position(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--checkpoint", str(trained / "out"), "--data", str(trained / "data"), "--rounds", "2"]
    (result,) = run_ranks(1, main, arguments, folder=tmp_path)
    position_lines = result.stdout[result.stdout.index("loss by position, context 16") :].splitlines()
    assert position_lines[1].split() == ["rounds", "0", "1", "2-3", "4-7", "8-15"]
    means = plain_losses(trained, 2, list(range(11))).mean(0)
    expected = [float(means[a:b].mean()) for a, b in ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16))]
    assert [float(cell) for cell in position_lines[2].split()[1:]] == pytest.approx(expected, abs=1e-4)


def many(cases: list[list[str]]) -> list[int]:
    return [main(case) for case in cases]


def test_mistakes_are_one_line(trained: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "other", {"validation": [np.arange(400) % 90]}, vocab_size=90)
    base = ["--checkpoint", str(trained / "out"), "--data"]
    cases = [
        ([*base, str(tmp_path / "nowhere")], "nowhere"),
        ([*base, str(tmp_path / "other")], f"other has 90 tokens, the model reads {VOCAB}"),
        ([*base, str(trained / "data"), "--split", "test"], "no split 'test'; it has train, validation"),
        ([*base, str(trained / "data"), "--context", "4000"], "tokens hold no window of context + 1 = 4001"),
        (["--checkpoint", str(tmp_path), "--data", str(trained / "data")], "is not a checkpoint of this project"),
    ]
    for result in run_ranks(2, many, [arguments for arguments, _ in cases], folder=tmp_path):
        assert result.value == [2] * len(cases)
        lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
        assert len(lines) == len(cases)
        for line, (_, message) in zip(lines, cases, strict=True):
            assert message in line
        assert "Traceback" not in result.stderr
    with pytest.raises(SystemExit):
        main([*base, "x", "--rounds", "0"])
