"""What a run tells while it goes on: metrics.jsonl, TensorBoard through DeepSpeed's monitor, and progress lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from data_prep.durable import write_atomic
from deeploop_model.visit_alignment import Alignment

Monitor = Any  # deepspeed.monitor.monitor.MonitorMaster carries no types


class RunLog:
    """Writes on rank 0 only. The x axis is the number of optimizer steps done.

    Args:
        out: the run folder.
        monitor: DeepSpeed's, which knows TensorBoard and whatever else the ds_config switches on.
        first_step: steps done before; what earlier runs logged of later steps is trained again, so it is dropped.
        steps: of the whole run, for the time left.
    """

    def __init__(
        self, out: Path, monitor: Monitor, *, first_step: int, steps: int, tokens_per_step: int, is_main: bool
    ) -> None:
        self._monitor = monitor
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._is_main = is_main
        self._metrics: TextIO | None = None
        if is_main:
            path = out / "metrics.jsonl"
            _drop_lines_after(path, first_step)
            _hide_points_after(monitor, first_step)
            self._metrics = path.open("a", encoding="utf-8")
        self.restart_clock(first_step)

    def restart_clock(self, step: int) -> None:
        """Speed is measured from here: validation and checkpoints do not count as training time."""
        self._clock_step, self._clock_time = step, time.perf_counter()

    def training(self, step: int, *, loss: float, lr: float, grad_norm: float, rounds: int, flops: int) -> None:
        """One line of metrics, TensorBoard points and a progress line for the step just done."""
        if not self._is_main:
            return
        seconds = (time.perf_counter() - self._clock_time) / (step - self._clock_step)
        speed = self._tokens_per_step / seconds
        left = seconds * (self._steps - step)
        self.restart_clock(step)
        values = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "rounds": rounds, "flops": flops}
        self._write(step, {**values, "tokens_per_second": round(speed, 1)}, prefix="train")
        self.say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}  lr {lr:.2e}  "
            f"grad norm {grad_norm:.3f}  {speed:,.0f} tokens/s  {_clock(left)} left"
        )

    def validation(self, step: int, loss: float) -> None:
        """The validation loss after `step` steps."""
        if not self._is_main:
            return
        self._write(step, {"val_loss": loss}, prefix="validation")
        self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  validation loss {loss:.4f}")

    def alignment(self, step: int, of_sub_layers: Mapping[str, Alignment]) -> None:
        """kappa_R and the stability number of each sub-layer, measured in the step just done."""
        if not self._is_main:
            return
        values: dict[str, float] = {}
        for name, found in of_sub_layers.items():
            values |= {f"kappa/{name}": found.kappa, f"stability/{name}": found.stability}
        self._write(step, values, prefix="visits")

    def say(self, line: str) -> None:
        """A line on standard output, from rank 0."""
        if self._is_main:
            print(line, flush=True)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def _write(self, step: int, values: dict[str, float], prefix: str) -> None:
        assert self._metrics is not None
        line = {"step": step, "tokens": step * self._tokens_per_step, **values}
        self._metrics.write(json.dumps({k: _json_number(v) for k, v in line.items()}) + "\n")
        self._metrics.flush()
        if self._monitor.enabled:
            names = {"val_loss": "loss"}
            self._monitor.write_events([(f"{prefix}/{names.get(k, k)}", v, step) for k, v in values.items()])


def _json_number(value: float) -> float | str:
    """JSON has no NaN or infinity; a diverged run must still leave lines that every reader accepts."""
    return value if math.isfinite(value) else str(value)


def _drop_lines_after(path: Path, step: int) -> None:
    """Lines of steps that will be trained again, or that a crash cut short."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    write_atomic(path, "".join(line + "\n" for line in kept).encode())


def _hide_points_after(monitor: Monitor, step: int) -> None:
    """TensorBoard's own mark of a restart: readers purge the points of this step and later ones."""
    if monitor.tb_monitor is not None:
        restart = Event(session_log=SessionLog(status=SessionLog.START))
        monitor.tb_monitor.summary_writer.file_writer.add_event(restart, step=step + 1)


def _step_of(line: str) -> float:
    try:
        record: dict[str, Any] = json.loads(line)
        return float(record["step"])
    except (ValueError, KeyError):
        return math.inf


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
