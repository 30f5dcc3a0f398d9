"""The learning rate as a function of the step alone, so that a resumed run cannot be off.

Step s counts from 0. With W warm-up steps, S steps in all and final fraction m:

    warm-up   s < W:   (s + 1) / (W + 1)
    cosine    s >= W:  m + (1 - m) * (1 + cos(pi * t)) / 2,   t = (s - W) / (S - 1 - W)
    wsd       1 until the last D steps, then 1 - (1 - m) * (s - (S - D) + 1) / D     (Hu et al. 2024, arXiv:2404.06395)

each times the peak; the last step, S - 1, runs at m times the peak.
"""

from __future__ import annotations

import math

from pretrain.config import ScheduleConfig
from pretrain.errors import ConfigError


def learning_rate(step: int, peak: float, steps: int, config: ScheduleConfig) -> float:
    """The learning rate of step `step` (from 0) of `steps`."""
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    if config.kind == "wsd":
        return peak * _stable_then_decay(step, steps, config)
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    wave = (1 + math.cos(math.pi * progress)) / 2
    return peak * (config.final_lr_fraction + (1 - config.final_lr_fraction) * wave)


def check_schedule(steps: int, config: ScheduleConfig) -> None:
    """Raises ConfigError where warm-up and decay do not fit into the run."""
    if config.warmup_steps >= steps:
        raise ConfigError(
            f"schedule.warmup_steps: {config.warmup_steps} leaves no step of train.steps {steps}; use fewer"
        )
    if config.kind == "cosine" and config.decay_steps is not None:
        raise ConfigError(f"schedule.decay_steps: {config.decay_steps}: only schedule.kind wsd has it; leave it out")
    if config.kind == "wsd" and config.warmup_steps + _decay_steps(steps, config) > steps:
        raise ConfigError(
            f"schedule.decay_steps: {_decay_steps(steps, config)} and warmup_steps {config.warmup_steps} "
            f"are more than train.steps {steps}; use {steps - config.warmup_steps} or fewer"
        )


def _stable_then_decay(step: int, steps: int, config: ScheduleConfig) -> float:
    decay_steps = _decay_steps(steps, config)
    into_decay = step - (steps - decay_steps) + 1
    if into_decay <= 0:
        return 1.0
    return 1 - (1 - config.final_lr_fraction) * min(1.0, into_decay / decay_steps)


def _decay_steps(steps: int, config: ScheduleConfig) -> int:
    return steps // 5 if config.decay_steps is None else config.decay_steps
