"""What a run tells while it goes on: metrics.jsonl, TensorBoard through DeepSpeed's monitor, and progress lines."""

from __future__ import annotations

import contextlib
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
        self._path = out / "metrics.jsonl"
        self._metrics: TextIO | None = None
        self.go_back(first_step)

    def go_back(self, step: int) -> None:
        """Drops what was logged of later steps than `step`: they are trained again."""
        if self._is_main:
            self.close()
            _drop_lines_after(self._path, step)
            _hide_points_after(self._monitor, step)
            self._metrics = self._path.open("a", encoding="utf-8")
        self.restart_clock(step)

    def restart_clock(self, step: int) -> None:
        """Speed is measured from here: validation and checkpoints do not count as training time."""
        self._clock_step, self._clock_time = step, time.perf_counter()

    def training(self, step: int, *, loss: float, lr: float, grad_norm: float, counts: dict[str, float]) -> None:
        """Metrics, TensorBoard points and a progress line for the step just done; `counts` are further numbers."""
        if not self._is_main:
            return
        seconds = (time.perf_counter() - self._clock_time) / (step - self._clock_step)
        speed = self._tokens_per_step / seconds
        left = seconds * (self._steps - step)
        self.restart_clock(step)
        values = {"loss": loss, "lr": lr, "grad_norm": grad_norm, **counts}
        self._write(step, {**values, "tokens_per_second": round(speed, 1)}, prefix="train")
        self.say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}  lr {lr:.2e}  "
            f"grad norm {grad_norm:.3f}  {speed:,.0f} tokens/s  {_clock(left)} left"
        )

    def validation(self, step: int, losses: dict[str, float], weights: dict[str, float]) -> None:
        """The validation loss after `step` steps: the sources' losses, weighted as in training."""
        if not self._is_main:
            return
        loss = sum(weights[name] * losses[name] for name in losses)
        by_source = {f"val_loss/{name}": loss for name, loss in losses.items()} if len(losses) > 1 else {}
        self._write(step, {"val_loss": loss, **by_source}, prefix="validation")
        self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  validation loss {loss:.4f}")

    def bad_step(self, step: int, fault: str, total: int, sample_ids: list[str]) -> None:
        """A step that harmed or would have, see `pretrain.bad_steps`."""
        told = f"bad step: {fault}"
        self.event(step, "bad_step", told, {"bad_steps": total}, fault=fault, sample_ids=sample_ids)

    def event(self, step: int, event: str, told: str, counts: dict[str, int], **values: Any) -> None:
        """Something that should not happen: a line of metrics, its counts as TensorBoard points, `told` for people."""
        if not self._is_main:
            return
        self._write_line(step, {"event": event, **counts, **values})
        self._write_points(step, "events", counts)
        self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  {told}")

    def alignment(self, step: int, of_sub_layers: Mapping[str, Alignment]) -> None:
        """kappa_R and the stability number of each sub-layer, measured in the step just done."""
        if not self._is_main:
            return
        values: dict[str, float] = {}
        for name, found in of_sub_layers.items():
            values |= {f"kappa/{name}": found.kappa, f"stability/{name}": found.stability}
        self._write(step, values, prefix="visits")

    def say(self, line: str) -> None:
        """A line on standard output, from rank 0. A launcher that is gone, and its pipe with it, stops nothing."""
        if self._is_main:
            with contextlib.suppress(OSError):
                print(line, flush=True)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def _write(self, step: int, values: dict[str, float], prefix: str) -> None:
        self._write_line(step, values)
        self._write_points(step, prefix, {key.replace("val_loss", "loss"): value for key, value in values.items()})

    def _write_line(self, step: int, values: dict[str, Any]) -> None:
        assert self._metrics is not None
        line = {"step": step, "tokens": step * self._tokens_per_step, **values}
        with contextlib.suppress(OSError):  # a full disk costs lines, not the run
            self._metrics.write(json.dumps({k: _json_value(v) for k, v in line.items()}) + "\n")
            self._metrics.flush()

    def _write_points(self, step: int, prefix: str, values: Mapping[str, float]) -> None:
        if self._monitor.enabled:
            with contextlib.suppress(OSError):
                self._monitor.write_events([(f"{prefix}/{k}", v, step) for k, v in values.items()])


def _json_value(value: Any) -> Any:
    """JSON has no NaN or infinity; a diverged run must still leave lines that every reader accepts."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
