"""From run folders to figures: what counts as diverged, mean and spread, and what the tables say of them."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pretrain import status
from pretrain.ablate.folder import State
from pretrain.ablate.plan import PlannedRun, plan
from pretrain.ablate.plots import write_plots
from pretrain.ablate.results import Result, cells, read_results
from pretrain.ablate.study import Divergence, Study
from pretrain.ablate.study_file import load_study
from pretrain.ablate.table import markdown, write_tables
from pretrain.ablate.unigram import unigram_loss
from pretrain.exit_codes import Exit
from tests.support.runs import write_tree


@pytest.fixture
def study(study_tree: dict[str, Any], tmp_path: Path) -> Study:
    study_tree["grids"]["rounds"]["axes"] |= {"seed": [0, 1, 2], "num_rounds": [1, 3]}
    return load_study(write_tree(tmp_path / "study.yaml", study_tree))


def leave(run: PlannedRun, losses: list[Any], ended: Exit | None = Exit.COMPLETE) -> None:
    """What a run leaves behind that had these validation losses, evenly over its tokens."""
    out = Path(run.config.out)
    out.mkdir(parents=True)
    (out / "config.yaml").touch()
    lines = [
        {"step": index, "tokens": 100 * index, key: value}
        for index, loss in enumerate(losses, 1)
        for key, value in (("loss", 9.9), ("val_loss", loss))
    ]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "val_lo')
    if ended is not None:
        status.write(out, ended, "")


def by_name(study: Study) -> dict[str, PlannedRun]:
    return {run.name: run for run in plan(study, [])}


def test_unigram_loss_is_that_of_the_training_frequencies(study: Study, study_data: Path) -> None:
    config = plan(study, [])[0].config
    tokens = {name: np.fromfile(study_data / f"corpus-{name}-00000.bin", np.uint16) for name in ("train", "validation")}
    windows = (len(tokens["train"]) - 1) // 16
    counted = np.concatenate([tokens["train"][i * 16 : i * 16 + 17] for i in range(windows)])
    frequencies = (np.bincount(counted, minlength=61) + 1) / (len(counted) + 61)
    scored = tokens["validation"][1 : (len(tokens["validation"]) - 1) // 16 * 16 + 1]
    assert unigram_loss(config) == pytest.approx(-np.log(frequencies[scored]).mean(), rel=1e-9)
    assert abs(unigram_loss(config) - math.log(61)) < 0.1  # the tokens are spread almost evenly


def test_what_counts_as_diverged(study: Study) -> None:
    names = by_name(study)
    leave(names["deeploop_R1_seed0"], [4.0, 3.0])
    leave(names["deeploop_R1_seed1"], [4.0, "nan"])
    leave(names["deeploop_R1_seed2"], [3.0, 4.1])
    leave(names["deeploop_R3_seed0"], [3.0], Exit.DIVERGED)
    leave(names["deeploop_R3_seed1"], [5.0], None)
    leave(names["deeploop_R3_seed2"], [], Exit.USER_ERROR)
    results = {result.run.name: result for result in read_results(plan(study, []), Divergence())}
    threshold = unigram_loss(names["deeploop_R1_seed0"].config) - 0.1
    assert {result.threshold for result in results.values()} == {threshold}
    divergence = {name: result.divergence for name, result in results.items() if result.divergence}
    assert divergence == {
        "deeploop_R1_seed1": "validation loss is not finite",
        "deeploop_R1_seed2": f"validation loss 4.100 is not below {threshold:.3f}",
        "deeploop_R3_seed0": "gave up after bad steps",
    }
    assert {name: result.loss for name, result in results.items() if result.loss} == {"deeploop_R1_seed0": 3.0}
    assert [results[f"deeploop_R3_seed{seed}"].state for seed in (0, 1, 2)] == [
        State.GAVE_UP, State.STARTED, State.FAILED,
    ]  # fmt: skip
    assert results["deepnorm_R1_seed0"].state is State.WAITING
    strict = {result.run.name: result for result in read_results(plan(study, []), Divergence(val_loss=2.9))}
    assert strict["deeploop_R1_seed0"].divergence == "validation loss 3.000 is not below 2.900"


def test_tables_give_mean_spread_and_divergences(study: Study) -> None:
    names = by_name(study)
    for seed, loss in enumerate((3.0, 3.1, 3.2)):
        leave(names[f"deeploop_R1_seed{seed}"], [4.0, loss])
        leave(names[f"deeploop_R3_seed{seed}"], [4.0, loss - 0.5])
    leave(names["deepnorm_R1_seed0"], [3.0])
    leave(names["deepnorm_R1_seed1"], [4.2])
    results = read_results(plan(study, []), Divergence())
    table = markdown(study, results)
    assert "| deeploop | 3.1000 ± 0.1000 | 2.6000 ± 0.1000 |" in table
    assert "| deepnorm | 3.0000; 1 of 3 diverged at 4.20; 1 of 3 unfinished | 3 of 3 unfinished |" in table
    assert "8 of 12 runs are finished." in table
    write_tables(study, results)
    with (Path(study.out) / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rule"], row["rounds"], row["p"]) for row in rows] == [
        ("deeploop", "1", "0.5"), ("deeploop", "3", "0.5"), ("deepnorm", "1", "0.25"), ("deepnorm", "3", "0.25"),
    ]  # fmt: skip
    assert float(rows[1]["val_loss_mean"]) == pytest.approx(2.6)
    assert float(rows[1]["val_loss_sd"]) == pytest.approx(0.1)
    assert (rows[2]["diverged"], rows[2]["unfinished"], rows[3]["val_loss_mean"]) == ("1", "1", "")
    assert int(rows[1]["train_flops"]) == names["deeploop_R3_seed0"].flops
    with (Path(study.out) / "runs.csv").open() as file:
        by_run = {row["run"]: row for row in csv.DictReader(file)}
    assert by_run["deepnorm_R1_seed1"]["divergence"].startswith("validation loss 4.200 is not below")
    assert by_run["deepnorm_R3_seed1"]["state"] == "waiting"


def test_pictures_show_every_axis_of_numbers(study_tree: dict[str, Any], tmp_path: Path) -> None:
    study_tree["grids"] = {
        "rounds": {
            "axes": {"residual": ["deeploop", "pre_ln"], "num_rounds": [1, 3], "optimizer.lr": [1e-3, 1e-2]},
            "controls": ["equal_flops_more_tokens"],
        },
        "exponents": {"axes": {"residual": ["deepnorm", "post_ln"], "p": [0.3, 0.5], "seed": [0, 1]}},
        "alone": {"axes": {"seed": [0]}},
    }  # fmt: skip
    study = load_study(write_tree(tmp_path / "study.yaml", study_tree))
    runs = plan(study, [])
    for run in runs:
        if run.setting.grid == "alone":
            continue
        diverges = run.exponent == 0.3 and run.config.train.seed == 1
        leave(run, [4.0, float("nan") if diverges else 3.0])
    written = write_plots(study, read_results(runs, study.divergence))
    assert sorted(path.name for path in written) == [
        "exponents-loss-by-p.png", "exponents-loss-by-tokens.png", "rounds-loss-by-lr.png",
        "rounds-loss-by-rounds.png", "rounds-loss-by-tokens.png",
    ]  # fmt: skip
    for path in written:
        with Image.open(path) as image:
            assert image.size[0] > 400
            assert len(np.unique(np.asarray(image.convert("L")))) > 10


def test_unfinished_seeds_do_not_make_a_mean(study: Study) -> None:
    run = by_name(study)["deeploop_R1_seed0"]
    leave(run, [2.0], None)
    (cell,) = cells([Result(run, State.STARTED, [(100, 2.0)], 4.0)])
    assert (cell.mean, cell.spread, cell.diverged, cell.unfinished) == (None, None, 0, 1)
