"""The learning rate at the steps where its shape shows."""

from __future__ import annotations

import itertools

import pytest

from pretrain.config import ScheduleConfig
from pretrain.errors import ConfigError
from pretrain.schedule import check_schedule, learning_rate

COSINE = ScheduleConfig(kind="cosine", warmup_steps=10, final_lr_fraction=0.1)
WSD = ScheduleConfig(kind="wsd", warmup_steps=10, final_lr_fraction=0.1, decay_steps=20)


def curve(config: ScheduleConfig, steps: int = 101) -> list[float]:
    return [learning_rate(step, 1e-3, steps, config) for step in range(steps)]


@pytest.mark.parametrize("config", [COSINE, WSD])
def test_warm_up_is_linear_and_never_zero(config: ScheduleConfig) -> None:
    rates = curve(config)
    assert rates[:10] == pytest.approx([1e-3 * (step + 1) / 11 for step in range(10)])


def test_cosine() -> None:
    rates = curve(COSINE)
    assert rates[10] == pytest.approx(1e-3)
    assert rates[55] == pytest.approx(0.55e-3)  # half way
    assert rates[100] == pytest.approx(1e-4)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_warmup_stable_decay() -> None:
    rates = curve(WSD)
    assert rates[10:81] == pytest.approx([1e-3] * 71)
    assert rates[81] == pytest.approx(1e-3 * (1 - 0.9 / 20))
    assert rates[90] == pytest.approx(1e-3 * (1 - 0.9 / 2))
    assert rates[100] == pytest.approx(1e-4)


def test_wsd_decays_over_a_fifth_by_default() -> None:
    rates = curve(ScheduleConfig(kind="wsd", warmup_steps=0, final_lr_fraction=0.0), steps=100)
    assert rates[79] == 1e-3
    assert rates[80] < 1e-3
    assert rates[99] == 0.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ScheduleConfig(warmup_steps=100), "schedule.warmup_steps: 100 leaves no step of train.steps 100"),
        (ScheduleConfig(warmup_steps=1, decay_steps=3), "schedule.decay_steps: 3: only schedule.kind wsd has it"),
        (ScheduleConfig(kind="wsd", warmup_steps=50, decay_steps=51), "schedule.decay_steps: 51 .* use 50 or fewer"),
    ],
)
def test_impossible_schedules(config: ScheduleConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_schedule(100, config)
