"""What counts as a bad step, and what a run of real ranks does about it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deeploop_model import DeepLoopModel
from pretrain.bad_steps import BadSteps, batch_of_step
from pretrain.config import RecoveryConfig
from pretrain.data_feed import Batch, TrainFeed
from pretrain.exit_codes import Exit
from pretrain.progress import Progress
from tests.support.ranks import run_ranks
from tests.support.runs import metrics, optimizer_tensors, run_main, small_tree, write_tree

RULE = RecoveryConfig(max_bad_steps=2, spike_nats=1.0, spike_window=4)


def test_non_finite_steps_count_and_good_ones_end_the_row() -> None:
    steps = BadSteps(RULE, {})
    assert steps.observe(0, 3.0, update_skipped=False) is None
    assert steps.observe(1, math.nan, update_skipped=True) == "non-finite loss"
    assert steps.observe(2, math.inf, update_skipped=False) == "non-finite loss"
    assert steps.to_pass_over() == []
    assert steps.in_a_row
    assert steps.observe(3, 3.0, update_skipped=False) is None
    assert not steps.in_a_row
    for batch in (4, 5, 6):
        assert steps.to_pass_over() == []
        assert steps.observe(batch, 3.0, update_skipped=True) == "non-finite gradient"
    assert steps.to_pass_over() == [4, 5, 6]
    assert steps.total == 5


def test_spikes_are_measured_from_the_median_of_good_losses() -> None:
    steps = BadSteps(RULE, {})
    assert [steps.observe(i, loss, update_skipped=False) for i, loss in enumerate((9.0, 3.0, 3.2, 3.1))] == [None] * 4
    assert steps.observe(4, 4.14, update_skipped=False) is None  # median 3.15
    assert steps.observe(5, 4.2, update_skipped=False) is not None  # of 3.0, 3.2, 3.1, 4.14 as well
    assert steps.observe(6, 4.2, update_skipped=False) is not None  # bad losses do not raise the median
    assert steps.observe(7, 4.1, update_skipped=False) is None


@given(st.lists(st.sampled_from([2.0, 2.1, 5.0, math.nan]), max_size=30), st.integers(0, 30))
def test_state_through_json_changes_no_decision(losses: list[float], cut: int) -> None:
    whole, parts = BadSteps(RULE, {}), BadSteps(RULE, {})
    for batch, loss in enumerate(losses):
        if batch == cut:
            parts = BadSteps(RULE, json.loads(json.dumps(parts.state())))
        verdicts = [steps.observe(batch, loss, update_skipped=False) for steps in (whole, parts)]
        assert verdicts[0] == verdicts[1]
        assert whole.to_pass_over() == parts.to_pass_over()
    assert whole.state() == parts.state()


@given(st.sets(st.integers(0, 40)))
def test_steps_take_the_batches_that_are_left_in_order(passed: set[int]) -> None:
    left = [batch for batch in range(200) if batch not in passed]
    assert [batch_of_step(step, sorted(passed)) for step in range(100)] == left[:100]


class Poison:
    """Spoils the loss of some global batches on rank 1: added to it, or with `gradient`, multiplied into it."""

    def __init__(self, batches: list[int], value: float, *, gradient: bool) -> None:
        self._batches, self._value, self._gradient = batches, value, gradient
        self._batch = -1
        self.trained: list[int] = []

    def micro_batches(self, feed: TrainFeed, batch: int) -> Iterator[Batch]:
        self._batch = batch
        self.trained.append(batch)
        return micro_batches(feed, batch)

    def forward(self, model: DeepLoopModel, *args: Any, **kwargs: Any) -> Any:
        output = forward(model, *args, **kwargs)
        if not (model.training and self._batch in self._batches and torch.distributed.get_rank() == 1):
            return output
        assert output.loss is not None
        assert output.last_loss is not None
        if self._gradient:
            return output._replace(loss=output.loss * self._value)
        loss, last_loss = output.loss + self._value, output.last_loss + self._value
        return output._replace(loss=loss, last_loss=last_loss)


micro_batches, forward = TrainFeed.micro_batches, DeepLoopModel.forward


def poisoned_main(config: Path, batches: list[int], value: float, gradient: bool, *overrides: str) -> Any:
    """The run's exit status and the batches that it trained on, in order."""
    poison = Poison(batches, value, gradient=gradient)
    with (
        patch.object(TrainFeed, "micro_batches", lambda feed, batch: poison.micro_batches(feed, batch)),
        patch.object(DeepLoopModel, "forward", lambda model, *args, **kw: poison.forward(model, *args, **kw)),
    ):
        return run_main(config, *overrides), poison.trained


def already_passed_main(config: Path, batches: list[int]) -> int:
    """A run that passes over some batches from the start."""
    begin = Progress.of

    def of(saved: Any, recovery: RecoveryConfig) -> Progress:
        progress = begin(saved, recovery)
        progress.passed_over = batches
        return progress

    with patch.object(Progress, "of", of):
        return run_main(config)


def tree(out: Path, dataset: Path, **recovery: Any) -> dict[str, Any]:
    values = small_tree(out, dataset, steps=16, validate_every=0)
    return {**values, "checkpoint": {"every": 5, "keep_last": 9}, "recovery": recovery}


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in metrics(out) if line.get("event") == kind]


@pytest.mark.parametrize(("value", "gradient"), [(math.inf, False), (math.nan, False), (math.nan, True)])
def test_a_non_finite_step_on_one_rank_changes_nothing_on_any(
    dataset: Path, tmp_path: Path, value: float, gradient: bool
) -> None:
    """An infinite constant added to the loss has a finite gradient: such a step must be skipped as well."""
    out = tmp_path / "out"
    values = tree(out, dataset)
    values["train"]["steps"] = 5
    values["checkpoint"] = {"every": 1, "keep_last": 9}
    config = write_tree(tmp_path / "run.yaml", values)
    results = run_ranks(2, poisoned_main, config, [2], value, gradient, folder=tmp_path)
    assert [r.value for r in results] == [(0, [0, 1, 2, 3, 4])] * 2
    before, after = (optimizer_tensors(out / f"checkpoints/step_{step:08}") for step in (2, 4))
    assert not (out / "checkpoints/step_00000003").exists()  # no place to go back to
    [event] = events(out, "bad_step")
    assert (event["step"], event["bad_steps"]) == (3, 1)
    assert event["fault"] == ("non-finite gradient" if gradient else "non-finite loss")
    assert len(event["sample_ids"]) == 8
    # Steps 1, 2 and 4 moved the weights; the optimizer counted three updates.
    state = torch.load(
        out / "checkpoints/step_00000004/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False
    )
    assert float(state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"]) == 3
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert not any(torch.equal(before[name], after[name]) for name in before if "/master/0" in name)


def test_too_many_bad_steps_go_back_and_pass_over_the_batches(dataset: Path, tmp_path: Path) -> None:
    """Afterwards the run equals one that never saw those batches, bit by bit."""
    for name, value, gradient in (("nan", math.nan, True), ("spike", 5.0, False)):
        out = tmp_path / name
        values = tree(out, dataset, max_bad_steps=2, spike_window=4)
        config = write_tree(tmp_path / "run.yaml", values)
        results = run_ranks(2, poisoned_main, config, [7, 8, 9], value, gradient, folder=tmp_path)
        once = [*range(10), 5, 6, *range(10, 19)]
        assert [r.value for r in results] == [(0, once)] * 2
        [event] = events(out, "rollback")
        assert (event["step"], event["from_step"], event["batches"]) == (5, 10, [7, 8, 9])
        assert [len(ids) for ids in event["sample_ids"]] == [8, 8, 8]
        assert (event["rollbacks"], event["bad_steps"]) == (1, 3)
        points = EventAccumulator(str(out / "tensorboard"))
        points.Reload()
        counted = [(p.step, p.value) for p in points.Scalars("events/rollbacks")]
        assert (5, 1) in counted
        assert counted[-1][1] == 1
        assert {value for step, value in counted if step < 5} == {0}
        assert [p.step for p in points.Scalars("train/loss")] == list(range(1, 17))

        clean = tmp_path / f"{name}_clean"
        config = write_tree(tmp_path / "clean.yaml", {**values, "out": str(clean)})
        assert [r.value for r in run_ranks(2, already_passed_main, config, [7, 8, 9], folder=tmp_path)] == [0, 0]
        a, b = (optimizer_tensors(folder / "checkpoints/step_00000016") for folder in (out, clean))
        assert [key for key in a if not torch.equal(a[key], b[key])] == []
        assert [line for line in metrics(out) if "loss" in line] == metrics(clean)


def test_rollbacks_end_and_say_so(dataset: Path, tmp_path: Path) -> None:
    values = tree(tmp_path / "out", dataset, max_bad_steps=0, max_rollbacks=2)
    config = write_tree(tmp_path / "run.yaml", values)
    results = run_ranks(2, poisoned_main, config, list(range(7, 100)), math.nan, True, folder=tmp_path)
    assert [r.value for r in results] == [(Exit.DIVERGED, [*range(8), 5, 6, 8, 5, 6, 9])] * 2
    assert all("after 2 returns to" in r.stderr for r in results)
    early = write_tree(tmp_path / "early.yaml", {**values, "out": str(tmp_path / "early")})
    results = run_ranks(2, poisoned_main, early, [1], math.nan, True, folder=tmp_path)
    assert [r.value[0] for r in results] == [Exit.DIVERGED] * 2
    assert all("has no whole checkpoint of a good step to go back to" in r.stderr for r in results)
