"""The number of rounds of a step: its distribution, its stages, and that it hangs on (seed, step) alone."""

from __future__ import annotations

import math
import random

import pytest

from pretrain.rounds import PoissonLognormalRounds, Rounds, RoundsStage, UniformRounds, rounds_of_step

UNIFORM = UniformRounds("uniform", low=2, high=5)
HUGINN = PoissonLognormalRounds("poisson_lognormal", mean=8.0, sigma=0.5)
STEPS = 4_000


def drawn(rounds: Rounds, steps: int = STEPS, seed: int = 3) -> list[int]:
    return [rounds_of_step(rounds, 4, seed, step) for step in range(steps)]


def test_fixed_numbers() -> None:
    assert set(drawn("fixed", 5)) == {4}
    assert set(drawn(7, 5)) == {7}


def test_uniform_reaches_both_ends_equally_often() -> None:
    counts = drawn(UNIFORM)
    assert set(counts) == {2, 3, 4, 5}
    for value in (2, 3, 4, 5):
        # Binomial: standard deviation sqrt(n * 1/4 * 3/4) = 27.
        assert counts.count(value) == pytest.approx(STEPS / 4, abs=5 * 28)


def test_poisson_lognormal_has_the_moments_and_the_tail_of_its_definition() -> None:
    """r - 1 has mean m and variance m + m^2 (e^(sigma^2) - 1); the shares agree with a plain simulation."""
    counts = drawn(HUGINN)
    mean = sum(counts) / STEPS
    variance = sum((r - mean) ** 2 for r in counts) / STEPS
    expected_variance = 8 + 64 * (math.exp(0.25) - 1)
    assert mean == pytest.approx(9, abs=5 * math.sqrt(expected_variance / STEPS))
    assert variance == pytest.approx(expected_variance, rel=0.2)
    simulated = [one_huginn_draw(random.Random(i)) for i in range(STEPS)]
    for limit in (2, 5, 8, 12, 20, 30):
        ours, theirs = (sum(r <= limit for r in sample) / STEPS for sample in (counts, simulated))
        assert ours == pytest.approx(theirs, abs=0.05), limit


def one_huginn_draw(generator: random.Random) -> int:
    """Poisson by counting exponential waiting times."""
    rate = math.exp(generator.gauss(math.log(8) - 0.125, 0.5))
    events, time = 0, generator.expovariate(1.0)
    while time < rate:
        events, time = events + 1, time + generator.expovariate(1.0)
    return events + 1


def test_high_cuts_the_tail_and_nothing_else() -> None:
    cut = PoissonLognormalRounds("poisson_lognormal", mean=8.0, sigma=0.5, high=10)
    assert drawn(cut, 500) == [min(r, 10) for r in drawn(HUGINN, 500)]


def test_a_step_draws_the_same_whatever_was_drawn_before() -> None:
    forward = drawn(HUGINN, 200)
    assert [rounds_of_step(HUGINN, 4, 3, step) for step in reversed(range(200))] == forward[::-1]
    assert drawn(HUGINN, 200, seed=4) != forward
    assert len(set(forward)) > 5


def test_stages_hold_from_their_first_step_on() -> None:
    stages = (RoundsStage(0, 2), RoundsStage(10, "fixed"), RoundsStage(15, UNIFORM))
    counts = drawn(stages, 40)
    assert counts[:15] == [2] * 10 + [4] * 5
    assert counts[15:] == drawn(UNIFORM, 40)[15:]
