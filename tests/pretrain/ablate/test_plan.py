"""Which runs a study consists of, and that controls are equal in what they promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrain.ablate.plan import PlannedRun, distinct, plan, stored_parameters
from pretrain.ablate.study_file import load_study
from pretrain.errors import ConfigError
from pretrain.schedule import learning_rate
from tests.support.runs import REPOSITORY, small_dataset, write_tree

STUDIES = sorted(path.stem for path in (REPOSITORY / "pretrain/studies").glob("*.yaml"))


def planned(tree: dict[str, Any], folder: Path, *overrides: str) -> list[PlannedRun]:
    return plan(load_study(write_tree(folder / "study.yaml", tree)), list(overrides))


def test_every_combination_is_a_run_and_the_first_seed_comes_first(study_tree: dict[str, Any], tmp_path: Path) -> None:
    study_tree["grids"]["rounds"]["axes"] = {
        "num_rounds": [1, 3], "residual": ["pre_ln"], "seed": [5, 6], "p": [0.3], "optimizer.lr": [1e-3, 6e-4],
    }  # fmt: skip
    runs = planned(study_tree, tmp_path)
    assert len({run.config.out for run in runs}) == len(runs) == 16
    assert [run.config.train.seed for run in runs] == [5] * 8 + [6] * 8
    names = [run.name for run in runs]
    assert names[:2] == ["pre_ln_R1_lr=0.001_seed5", "pre_ln_R1_lr=0.0006_seed5"]
    run = runs[names.index("p0.3_R3_lr=0.0006_seed6")]
    assert run.config.out == f"{study_tree['out']}/rounds/{run.name}"
    assert (run.config.model.num_rounds, run.config.optimizer.lr, run.config.train.seed) == (3, 6e-4, 6)
    assert run.config.model.rule.alpha == pytest.approx((2 * 6) ** 0.3)
    assert run.config.model.rule.beta == pytest.approx((8 * 6) ** -0.3)
    assert [run.exponent for run in runs[::4]] == [None, 0.3, None, 0.3]


def test_overrides_reach_every_run_and_axes_are_no_overrides(study_tree: dict[str, Any], tmp_path: Path) -> None:
    study_tree["overrides"] = {"train.steps": 7, "optimizer.weight_decay": 0.2}
    study_tree["grids"]["rounds"]["overrides"] = {"train.steps": 8}
    runs = planned(study_tree, tmp_path, "optimizer.weight_decay=0.3")
    assert {(run.config.train.steps, run.config.optimizer.weight_decay) for run in runs} == {(8, 0.3)}
    with pytest.raises(ConfigError, match=r"train\.seed is an axis of grid rounds; change it there"):
        planned(study_tree, tmp_path, "train.seed=3")
    with pytest.raises(ConfigError, match="out is of the study file"):
        planned(study_tree, tmp_path, "out=elsewhere")


def test_controls_are_equal_in_what_they_promise(study_tree: dict[str, Any], tmp_path: Path) -> None:
    study_tree["grids"]["rounds"] = {
        "axes": {"residual": ["deeploop"], "num_rounds": [3, 5]},
        "controls": ["equal_parameters", "equal_flops_more_tokens", "equal_flops_unshared"],
    }
    runs = {run.name: run for run in planned(study_tree, tmp_path)}
    assert list(runs) == [
        "deeploop_R3_seed0", "deeploop_R1_seed0", "deeploop_R3_equal-flops-more-tokens_seed0",
        "deeploop_R3_equal-flops-unshared_seed0", "deeploop_R5_seed0", "deeploop_R5_equal-flops-more-tokens_seed0",
        "deeploop_R5_equal-flops-unshared_seed0",
    ]  # fmt: skip
    unlooped = runs["deeploop_R1_seed0"]
    for rounds in (3, 5):
        looped = runs[f"deeploop_R{rounds}_seed0"]
        more_tokens = runs[f"deeploop_R{rounds}_equal-flops-more-tokens_seed0"]
        unshared = runs[f"deeploop_R{rounds}_equal-flops-unshared_seed0"]
        assert {run.config.model.num_rounds for run in (unlooped, more_tokens, unshared)} == {1}
        # Parameters: K blocks in the looped model and beside it; K * R of their own.
        stored = [stored_parameters(run.config.model) for run in (looped, unlooped, more_tokens, unshared)]
        assert stored[0] == stored[1] == stored[2]
        block = 4 * 32 * 32 + 8 * 32 * 32 + 2 * 32
        assert stored[3] - stored[0] == 2 * (rounds - 1) * block
        # Tokens.
        assert looped.tokens == unlooped.tokens == unshared.tokens == 20 * 8 * 16
        # FLOPs: to half a step, and exactly. By hand: 6 a weight of matrices, attention, output matrix.
        step = 8 * 16 * 3 * (2 * 64 * 32 + 2 * (24 * 32 * 32 + 4 * 16 * 32))
        assert unlooped.flops == 20 * step
        assert looped.flops == unshared.flops > unlooped.flops
        assert abs(more_tokens.flops - looped.flops) <= step / 2
        assert looped.flops == 20 * 8 * 16 * 3 * (2 * 64 * 32 + rounds * 2 * (24 * 32 * 32 + 4 * 16 * 32))
        # The depth that the rule sees is the control's own.
        assert more_tokens.config.model.rule.alpha == pytest.approx(4**0.5)
        assert unshared.config.model.rule == looped.config.model.rule
        assert unshared.config.train == looped.config.train


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.rounds={distribution: uniform, low: 1, high: 3}", "need train.rounds fixed"),
        ("model.injection=concat-linear", "equal_flops_unshared trains .* where deeploop_R3_seed0 trains"),
    ],
)
def test_controls_that_could_not_be_equal_are_refused(
    override: str, message: str, study_tree: dict[str, Any], tmp_path: Path
) -> None:
    study_tree["grids"]["rounds"] = {
        "axes": {"residual": ["deeploop"], "num_rounds": [3]}, "controls": ["equal_flops_unshared"],
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        planned(study_tree, tmp_path, override)


def test_two_runs_of_one_name_are_refused(study_tree: dict[str, Any], tmp_path: Path) -> None:
    study_tree["grids"]["rounds"]["axes"] = {"monitor.sample_prompt": ["a b", "a/b"]}
    with pytest.raises(ConfigError, match="two different runs would be called deeploop_R2_sample_prompt=a-b_seed0"):
        planned(study_tree, tmp_path)


def test_a_run_of_two_grids_is_trained_once(study_tree: dict[str, Any], tmp_path: Path) -> None:
    study_tree["grids"]["sweep"] = {
        "axes": {"num_rounds": [2], "residual": ["deeploop"], "p": [0.3], "seed": [0]},
        "controls": ["equal_parameters", "equal_flops_unshared"],
    }
    runs = planned(study_tree, tmp_path)
    shared = [run for run in runs if run.setting.grid == "sweep" and "/rounds/" in run.config.out]
    assert [run.name for run in shared] == ["deeploop_R2_seed0", "deeploop_R1_seed0"]
    trained = distinct(runs)
    assert [run.setting.grid for run in trained] == ["rounds"] * 4 + ["sweep"] * 4
    assert len({run.config.out for run in trained}) == 8


@pytest.fixture(scope="module")
def long_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough tokens for the longest context."""
    return small_dataset(tmp_path_factory.mktemp("long") / "data", train_tokens=5000, validation_tokens=5000)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_of_the_project_can_be_run(name: str, long_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    study = load_study(REPOSITORY / f"pretrain/studies/{name}.yaml")
    assert study.out == f"runs/study-{name.replace('_', '-')}"
    runs = plan(study, [f"data.path={long_dataset}"])
    assert all(run.config.out.startswith(f"{study.out}/") for run in runs)
    if name.startswith("paper"):
        check_paper(runs, blocks=12 if name == "paper_small" else 24)


def check_paper(runs: list[PlannedRun], blocks: int) -> None:
    """The paper's setting, whatever the files that a study is made of become."""
    main = [run for run in runs if run.setting.grid == "rounds"]
    assert {run.config.model.num_rounds for run in main} == {1, 3, 5, 7}
    assert {run.setting.rule for run in main} >= {"deeploop", "deepnorm"}
    for run in main:
        model, train, optimizer = run.config.model, run.config.train, run.config.optimizer
        assert (model.num_blocks, model.context_length) == (blocks, 1024)
        assert (train.steps, train.global_batch_size) == (100_000, 480)
        rate = [learning_rate(step, optimizer.lr, train.steps, run.config.schedule) for step in (2000, 99_999)]
        assert rate == pytest.approx([6e-4, 3e-5])
    for run in (run for run in runs if run.setting.grid == "exponents"):
        whole = main[0].config
        rates = [
            [learning_rate(s, c.optimizer.lr, c.train.steps, c.schedule) for s in range(2001)]
            for c in (run.config, whole)
        ]
        assert rates[0] == pytest.approx(rates[1], rel=1e-9)
        assert run.config.model.num_rounds == 3
