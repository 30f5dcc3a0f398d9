"""How many rounds a training step runs: fixed, drawn, or changing over the run.

    train.rounds: fixed                                                   model.num_rounds in every step
    train.rounds: 6                                                       6 in every step
    train.rounds: {distribution: uniform, low: 1, high: 8}                low..high, equally likely
    train.rounds: {distribution: poisson_lognormal, mean: 32, sigma: 0.5}
    train.rounds: [{from_step: 0, rounds: 2}, {from_step: 1000, rounds: {distribution: ...}}]

The number for step s is a function of (seed, s) alone: equal on all ranks, and after a resume. alpha and beta stay
those of model.num_rounds, whatever runs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Discriminator, Tag

from deeploop_model import DeepLoopModel, ModelConfigError
from deeploop_model.round_loss import RoundLoss, round_weights
from pretrain.errors import ConfigError
from pretrain.seeding import step_generator

Count = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class UniformRounds:
    """Every number from `low` to `high`, both included, equally likely."""

    distribution: Literal["uniform"]
    low: Count
    high: Count


@dataclass(frozen=True)
class PoissonLognormalRounds:
    """tau ~ N(log(mean) - sigma^2/2, sigma^2), r ~ Poisson(e^tau) + 1 (Geiping et al. 2025, arXiv:2502.05171).

    e^tau has the expectation `mean`, so r has mean + 1; its tail is heavy, so that long loops are seen as well.
    """

    distribution: Literal["poisson_lognormal"]
    mean: Annotated[float, Gt(0), Le(10_000)]
    sigma: Annotated[float, Ge(0), Le(4)] = 0.5
    high: Count | None = None
    """Larger draws become this one: the tail has no end, memory has."""


def _kind(value: Any) -> str | None:
    """Which form of `train.rounds` is meant, so that a fault is told for that form only."""
    if isinstance(value, dict):
        named = value.get("distribution")
        return named if named in ("uniform", "poisson_lognormal") else None
    if isinstance(value, int):
        return "count"
    return "stages" if isinstance(value, list) else "fixed" if value == "fixed" else None


_FORMS = "fixed, a number, {distribution: uniform, low: 1, high: 8} or {distribution: poisson_lognormal, mean: 4}"
RoundsRule = Annotated[
    Annotated[Literal["fixed"], Tag("fixed")]
    | Annotated[Count, Tag("count")]
    | Annotated[UniformRounds, Tag("uniform")]
    | Annotated[PoissonLognormalRounds, Tag("poisson_lognormal")],
    Discriminator(_kind, custom_error_type="rounds", custom_error_message=_FORMS),
]


@dataclass(frozen=True)
class RoundsStage:
    """What holds from step `from_step` (counted from 0) on, until the next stage."""

    from_step: Annotated[int, Ge(0)]
    rounds: RoundsRule


Rounds = Annotated[
    Annotated[Literal["fixed"], Tag("fixed")]
    | Annotated[Count, Tag("count")]
    | Annotated[UniformRounds, Tag("uniform")]
    | Annotated[PoissonLognormalRounds, Tag("poisson_lognormal")]
    | Annotated[tuple[RoundsStage, ...], Tag("stages")],
    Discriminator(_kind, custom_error_type="rounds", custom_error_message=f"{_FORMS}, or a list of stages"),
]


def rounds_of_step(rounds: Rounds, num_rounds: int, seed: int, step: int) -> int:
    """Rounds to run in step `step` (from 0). `num_rounds` is the model's, for `fixed`."""
    rule = rule_at(rounds, step)
    if rule == "fixed":
        return num_rounds
    if isinstance(rule, int):
        return rule
    generator = step_generator(seed, step, "rounds")
    if isinstance(rule, UniformRounds):
        return int(generator.integers(rule.low, rule.high, endpoint=True))
    tau = generator.normal(math.log(rule.mean) - rule.sigma**2 / 2, rule.sigma)
    drawn = int(generator.poisson(math.exp(tau))) + 1
    return drawn if rule.high is None else min(drawn, rule.high)


def rule_at(rounds: Rounds, step: int) -> RoundsRule:
    """The rule in force at step `step`."""
    if not isinstance(rounds, tuple):
        return rounds
    return next(stage.rounds for stage in reversed(rounds) if stage.from_step <= step)


def most_rounds(rounds: Rounds, num_rounds: int) -> float:
    """The largest number of rounds that a step can run; infinity where there is none."""
    most = 0.0
    for stage in rounds if isinstance(rounds, tuple) else (RoundsStage(0, rounds),):
        rule = num_rounds if stage.rounds == "fixed" else stage.rounds
        most = max(most, rule if isinstance(rule, int) else math.inf if rule.high is None else rule.high)
    return most


def check_backprop(backprop_rounds: int | None, rounds: Rounds, model: DeepLoopModel) -> None:
    """Raises ConfigError where truncated back-propagation would leave a trained weight without a gradient.

    Without injection the stream that enters the last rounds is all that they know of what lies before the loop, and it
    is a constant to them.
    """
    if backprop_rounds is None or model.injection is not None:
        return
    if backprop_rounds >= most_rounds(rounds, model.config.num_rounds):
        return
    before_the_loop = ["position_embedding.", "embedding_norm.", "prelude."]
    if model.head is not None:
        before_the_loop.append("embedding.")  # a tied embedding is reached through the logits
    for name, weight in model.named_parameters():
        if weight.requires_grad and name.startswith(tuple(before_the_loop)):
            raise ConfigError(
                f"train.backprop_rounds: {backprop_rounds}: without model.injection no gradient reaches {name}; set "
                f"model.injection to add or concat-linear, or add {name.split('.')[0]}.* to train.frozen"
            )


def check_round_loss(round_loss: RoundLoss, rounds: Rounds, num_rounds: int) -> None:
    """Raises ConfigError for weights that do not belong to the rounds that run."""
    if isinstance(round_loss, str):
        return
    for stage in rounds if isinstance(rounds, tuple) else (RoundsStage(0, rounds),):
        count = num_rounds if stage.rounds == "fixed" else stage.rounds
        if not isinstance(count, int):
            raise ConfigError("train.round_loss: weights by number need a fixed train.rounds; use uniform or linear")
        try:
            round_weights(round_loss, count)
        except ModelConfigError as error:
            raise ConfigError(f"train.{error}") from None


def check_rounds(rounds: Rounds) -> None:
    """Raises ConfigError where a range is empty or the stages do not follow one another from step 0."""
    stages = rounds if isinstance(rounds, tuple) else (RoundsStage(0, rounds),)
    if not stages or stages[0].from_step != 0:
        found = stages[0].from_step if stages else "an empty list"
        raise ConfigError(f"train.rounds.0.from_step: {found}: the first stage must begin at step 0")
    for index, (earlier, later) in enumerate(itertools.pairwise(stages), start=1):
        if later.from_step <= earlier.from_step:
            raise ConfigError(
                f"train.rounds.{index}.from_step: {later.from_step} must be more than {earlier.from_step}, "
                "where the stage before begins"
            )
    for stage in stages:
        if isinstance(stage.rounds, UniformRounds) and stage.rounds.low > stage.rounds.high:
            raise ConfigError(f"train.rounds: low {stage.rounds.low} is more than high {stage.rounds.high}")
