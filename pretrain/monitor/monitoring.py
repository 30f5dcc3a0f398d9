"""What a run measures of itself, on which steps, beside the loss: the part of the loop between a step and its log.

| what                                       | on which steps                    | module                              |
|--------------------------------------------|-----------------------------------|-------------------------------------|
| loss, learning rate, speed, times, memory  | log_every                         | step_times, here                    |
| alignment of the visits' gradients         | kappa_every                       | visit_alignment                     |
| gradient norms, time of collectives        | detail_every                      | gradient_norms, collective_times    |
| loop health                                | loop_health_every, and the last   | loop_monitor                        |

All ranks measure alike, for most of it needs all of them; rank 0 logs. Times and memory are rank 0's.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import yaml

from deeploop_model.flops import recompute_flops, train_flops
from deeploop_model.visit_alignment import VisitAlignment, measured_visits
from pretrain.config import RunConfig
from pretrain.config_file import as_tree
from pretrain.data_feed import bytes_per_token
from pretrain.engine import Engine
from pretrain.monitor.collective_times import CollectiveTimes, timed_collectives
from pretrain.monitor.dashboard import Dashboard
from pretrain.monitor.device_peak import peak_of
from pretrain.monitor.gradient_norms import gradient_norms
from pretrain.monitor.loop_monitor import LoopMonitor, collapses
from pretrain.monitor.loss_units import in_other_units, mixed_bytes_per_token
from pretrain.monitor.run_log import RunLog
from pretrain.monitor.step_times import StepTimes
from pretrain.progress import Progress
from pretrain.ranks import Ranks, sum_over_ranks
from pretrain.recompute import chosen_recompute
from pretrain.run_data import RunData

GIB = 2**30


class Monitoring:
    """Measures one run on all ranks.

    Args:
        first_step: steps done before.
    """

    def __init__(
        self, engine: Engine, config: RunConfig, data: RunData, ranks: Ranks, log: RunLog, first_step: int
    ) -> None:
        self._engine = engine
        self._config = config
        self._data = data
        self._ranks = ranks
        self._log = log
        self._recompute, _ = chosen_recompute(config)
        self.times = StepTimes(ranks.device)
        self._loop = LoopMonitor(engine, data, config, ranks) if config.monitor.loop_health_every else None
        self._bytes_per_token = mixed_bytes_per_token(
            {name: bytes_per_token(split) for name, split in zip(data.weights, data.training.splits, strict=True)},
            data.weights,
        )
        self._alignment: VisitAlignment | None = None
        self._collectives: CollectiveTimes | None = None
        self._gradient_norms: dict[str, float] = {}
        tensorboard = engine.monitor.tb_monitor
        writer = tensorboard.summary_writer if tensorboard is not None else None
        self.dashboard = Dashboard(writer, config, yaml.safe_dump(as_tree(config), sort_keys=False))
        self._peak, fault = peak_of(ranks.device, config.monitor.peak_tflops)
        if fault is not None:
            log.say(fault)
        self.restart(first_step)

    def restart(self, step: int) -> None:
        """Forgets what was gathered since the last log: the run is at `step`."""
        self.times.restart()
        self._since, self._model_flops, self._hardware_flops = step, 0, 0

    @contextmanager
    def of_step(self, step: int) -> Iterator[Callable[[], None] | None]:
        """Around the step after which `step` are done. Gives what `train_step` is to call before the update."""
        monitor = self._config.monitor
        detailed = on(step, monitor.detail_every)
        visits = measured_visits(self._engine.module) if on(step, monitor.kappa_every) else nullcontext()
        with visits as self._alignment, timed_collectives() if detailed else nullcontext() as self._collectives:
            yield self._note_gradient_norms if detailed else None

    def _note_gradient_norms(self) -> None:
        self._gradient_norms = gradient_norms(self._engine)

    def flops(self, num_rounds: int) -> int:
        """Takes in that a step of `num_rounds` rounds is done. Returns its matrix-product FLOPs, over all ranks."""
        train, model = self._config.train, self._config.model
        options: dict[str, Any] = {"backprop_rounds": train.backprop_rounds, "round_loss": train.round_loss}
        tokens = train.global_batch_size * model.context_length
        of_model = tokens * train_flops(model, num_rounds, **options)
        again = tokens * recompute_flops(model, self._recompute, num_rounds, **options)
        self._model_flops += of_model
        self._hardware_flops += of_model + again
        return of_model

    def after_step(self, step: int, *, loss: float, lr: float, num_rounds: int, progress: Progress, last: bool) -> None:
        """Logs what is due after `step` steps."""
        self._log.step_done(step, loss)
        if last or step % self._config.monitor.log_every == 0:
            epochs = self._data.epochs(progress.batch * self._config.train.global_batch_size)
            values = {
                "loss": loss,
                **in_other_units(loss, self._bytes_per_token),
                "lr": lr,
                "grad_norm": float(self._engine.get_global_grad_norm()),
                "rounds": num_rounds,
                "flops": progress.flops,
                **epochs,
            }
            seconds, system = self._system(step)
            counts = {"bad_steps": progress.bad_steps.total, "skipped_steps": int(self._engine.skipped_steps)}
            self._log.training(step, values, seconds, system, counts)
        if self._alignment is not None:
            self._log.alignment(step, self._alignment.of(sum_over_ranks(self._alignment.squares(self._ranks.device))))
        if self._collectives is not None:
            self._log.detail(step, self._gradient_norms, self._collectives.seconds)

    def loop(self, step: int, *, last: bool) -> None:
        """Measures the loop after `step` steps. Every rank must call it."""
        if self._loop is None:
            return
        with self.times.beside("loop_health"):
            health = self._loop.measure()
            self._log.loop(step, health)
            self.dashboard.loop(step, health, last=last)
        found = collapses(health, self._config.monitor)
        if found:
            told = "; ".join(f"collapse: {sentence}" for sentence in found.values())
            self._log.event(step, "collapse", told, {f"collapsed_{name}": 1 for name in found})

    def validation(self, step: int, losses: dict[str, float]) -> None:
        """Logs the sources' validation losses after `step` steps."""
        known = {name: bytes_per_token(split) for name, split in self._data.validation.items()}
        self._log.validation(step, losses, self._data.weights, known)

    def _system(self, step: int) -> tuple[float, dict[str, float]]:
        """Seconds of a step, and speed, times and memory, since the last time."""
        steps = step - self._since
        spent = self.times.take(steps)
        world = self._ranks.world_size
        tokens = self._config.train.global_batch_size * self._config.model.context_length
        system = {"speed/tokens_per_second_per_device": tokens / spent.step / world}
        if self._peak is not None:
            possible = spent.step * steps * world * self._peak
            system |= {"speed/mfu": self._model_flops / possible, "speed/hfu": self._hardware_flops / possible}
        system |= {f"time/{part}": seconds for part, seconds in spent.parts.items()} | {"time/step": spent.step}
        system |= memory(self._ranks.device)
        self.restart(step)
        return spent.step, system


def on(step: int, every: int) -> bool:
    """Whether something done every `every` steps (0: never) is to be done in step `step`, counted from 1."""
    return every > 0 and step % every == 0


def memory(device: torch.device) -> dict[str, float]:
    """GiB of the device that tensors took at most since the last time, and that PyTorch holds; or, on a CPU, the
    largest resident size of this process so far."""
    if device.type != "cuda":
        return {"memory/peak_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    held = {
        "memory/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "memory/allocated_gib": torch.cuda.memory_allocated(device) / GIB,
        "memory/reserved_gib": torch.cuda.memory_reserved(device) / GIB,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return held
