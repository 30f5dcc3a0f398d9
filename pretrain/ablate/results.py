"""From finished runs to figures: which of them diverged, and mean and spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.ablate.folder import State, read_curve, state_of
from pretrain.ablate.plan import PlannedRun, Setting, stored_parameters
from pretrain.ablate.study import Divergence
from pretrain.ablate.unigram import unigram_loss


@dataclass(frozen=True)
class Result:
    """One run as it stands."""

    run: PlannedRun
    state: State
    curve: list[tuple[int, float]]
    """(tokens, validation loss)."""
    threshold: float
    """At or above this final validation loss the run counts as diverged."""

    @property
    def final_loss(self) -> float | None:
        return self.curve[-1][1] if self.curve else None

    @property
    def divergence(self) -> str | None:
        """Why the run counts as diverged, or None. A run under way does not."""
        if self.state is State.GAVE_UP:
            return "gave up after bad steps"
        if self.state is not State.COMPLETE:
            return None
        loss = self.final_loss
        if loss is None or not math.isfinite(loss):
            return "validation loss is not finite"
        return f"validation loss {loss:.3f} is not below {self.threshold:.3f}" if loss >= self.threshold else None

    @property
    def loss(self) -> float | None:
        """The validation loss that counts: of a run that is complete and did not diverge."""
        return self.final_loss if self.state is State.COMPLETE and not self.divergence else None


@dataclass(frozen=True)
class Cell:
    """The seeds of one setting."""

    setting: Setting
    results: tuple[Result, ...]

    @property
    def first(self) -> PlannedRun:
        """What is no matter of seeds is read from here."""
        return self.results[0].run

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results if result.loss is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.losses) if self.losses else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds, from two on."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def diverged(self) -> int:
        return sum(result.divergence is not None for result in self.results)

    @property
    def unfinished(self) -> int:
        return sum(not result.state.is_result for result in self.results)

    @property
    def stored_parameters(self) -> int:
        return stored_parameters(self.first.config.model)


def read_results(runs: Sequence[PlannedRun], divergence: Divergence) -> list[Result]:
    """How all runs stand."""
    return [Result(run, state_of(run), read_curve(run).validation, _threshold(run, divergence)) for run in runs]


def cells(results: Sequence[Result]) -> list[Cell]:
    """Results by setting, in the order of the plan."""
    by_setting: dict[Setting, list[Result]] = {}
    for result in results:
        by_setting.setdefault(result.run.setting, []).append(result)
    return [Cell(setting, tuple(found)) for setting, found in by_setting.items()]


def _threshold(run: PlannedRun, divergence: Divergence) -> float:
    if divergence.val_loss is not None:
        return divergence.val_loss
    return unigram_loss(run.config) - divergence.margin
