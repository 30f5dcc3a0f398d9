"""What a run tells while it goes on: metrics.jsonl, TensorBoard through DeepSpeed's monitor, and progress lines."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from data_prep.durable import write_atomic
from deeploop_model.loop_health import LoopHealth
from deeploop_model.visit_alignment import Alignment
from pretrain.monitor.loss_units import in_other_units, mixed_bytes_per_token
from pretrain.monitor.progress_line import ProgressLine

OVER_BLOCKS = {
    **dict.fromkeys(("state_norm", "state_change", "state_cosine", "attention_entropy"), "mean over blocks"),
    "attention_logit": "largest of all blocks",
}
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
        self._line = ProgressLine(first_step, steps, wanted=is_main)
        self._told = ""
        self._metrics: TextIO | None = None
        self.restarts = self.rollbacks = 0
        """Starts that went on from a checkpoint, this one included, and returns to one, as far as the file tells."""
        if is_main:
            self._read_counts()
        self.go_back(first_step)
        if first_step and is_main:
            self.restarts += 1
            self._write_line(first_step, {"event": "restart", "restarts": self.restarts, "rollbacks": self.rollbacks})

    def go_back(self, step: int) -> None:
        """Drops what was logged of later steps than `step`: they are trained again."""
        if self._is_main:
            self._close_metrics()
            _drop_lines_after(self._path, step)
            _hide_points_after(self._monitor, step)
            self._metrics = self._path.open("a", encoding="utf-8")

    def training(
        self,
        step: int,
        values: Mapping[str, float],
        seconds: float,
        system: Mapping[str, float],
        counts: Mapping[str, int],
    ) -> None:
        """Metrics, TensorBoard points and a progress line for the step just done.

        Args:
            values: loss, lr, grad_norm and what else belongs under `train/`.
            seconds: of a step.
            system: speed, times and memory, by their tags.
            counts: of what should not happen, since step 0.
        """
        if not self._is_main:
            return
        speed = self._tokens_per_step / seconds
        values = {**values, "tokens_per_second": round(speed, 1)}
        self._write_line(step, {**values, **{name: _rounded(value) for name, value in system.items()}})
        self._write_points(step, "train", values)
        self._write_points(step, "", system)
        self._write_points(step, "events", {"restarts": self.restarts, "rollbacks": self.rollbacks, **counts})
        self._told = (
            f"lr {values['lr']:.2e}  grad norm {values['grad_norm']:.3f}  {speed:,.0f} tokens/s  "
            f"{clock(seconds * (self._steps - step))} left"
        )
        if not self._line.live:
            self.say(f"{self._at(step)}  loss {values['loss']:.4f}  {self._told}")

    def step_done(self, step: int, loss: float) -> None:
        """Moves the progress line, where there is a terminal to draw it on."""
        self._line.show(step, f"{self._at(step)}  loss {loss:.4f}  {self._told}")

    def validation(
        self,
        step: int,
        losses: Mapping[str, float],
        weights: Mapping[str, float],
        bytes_per_token: Mapping[str, float | None],
    ) -> None:
        """The validation loss after `step` steps: the sources' losses, weighted as in training."""
        if not self._is_main:
            return
        loss = sum(weights[name] * losses[name] for name in losses)
        values = {"loss": loss, **in_other_units(loss, mixed_bytes_per_token(bytes_per_token, weights))}
        if len(losses) > 1:
            for name, of_source in losses.items():
                units = {"loss": of_source, **in_other_units(of_source, bytes_per_token.get(name))}
                values |= {f"{unit}/{name}": value for unit, value in units.items()}
        self._write_line(step, {f"val_{name}": value for name, value in values.items()})
        self._write_points(step, "validation", values)
        self.say(f"{self._at(step)}  validation loss {loss:.4f}")

    def bad_step(self, step: int, fault: str, total: int, sample_ids: list[str]) -> None:
        """A step that harmed or would have, see `pretrain.bad_steps`."""
        told = f"bad step: {fault}"
        self.event(step, "bad_step", told, {"bad_steps": total}, fault=fault, sample_ids=sample_ids)

    def event(self, step: int, event: str, told: str, counts: dict[str, int], **values: Any) -> None:
        """Something that should not happen: a line of metrics, its counts as TensorBoard points, `told` for people."""
        if not self._is_main:
            return
        self.rollbacks += event == "rollback"
        self._write_line(step, {"event": event, **counts, **values})
        self._write_points(step, "events", counts)
        self.say(f"{self._at(step)}  {told}")

    def alignment(self, step: int, of_sub_layers: Mapping[str, Alignment]) -> None:
        """kappa_R and the stability number of each sub-layer, measured in the step just done."""
        if not self._is_main:
            return
        values: dict[str, float] = {}
        for name, found in of_sub_layers.items():
            values |= {f"kappa/{name}": found.kappa, f"stability/{name}": found.stability}
        self._write_line(step, values)
        self._write_points(step, "visits", values)

    def detail(self, step: int, gradient_norms: Mapping[str, float], collective_seconds: float) -> None:
        """Gradient norms by part of the model, and the time of collectives, in the step just done."""
        if not self._is_main:
            return
        norms = {f"grad_norm/{name}": norm for name, norm in gradient_norms.items()}
        time = {"time/communication": collective_seconds}
        self._write_line(step, norms | {"time/communication": _rounded(collective_seconds)})
        self._write_points(step, "", norms | time)

    def loop(self, step: int, health: LoopHealth) -> None:
        """Loop health after `step` steps: [round][block] and [round] lists in metrics.jsonl, scalars in TensorBoard."""
        if not self._is_main:
            return
        lists = {f"loop/{name}": values for name, values in {**health.per_block, **health.per_round}.items()}
        self._write_line(step, lists)
        self._write_points(step, "", loop_scalars(health))

    def say(self, line: str) -> None:
        """A line on standard output, from rank 0."""
        self._line.say(line)

    def close(self) -> None:
        self._line.close()
        self._close_metrics()

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def _at(self, step: int) -> str:
        return f"step {step:>{len(str(self._steps))}}/{self._steps}"

    def _write_line(self, step: int, values: dict[str, Any]) -> None:
        assert self._metrics is not None
        line = {"step": step, "tokens": step * self._tokens_per_step, **values}
        with contextlib.suppress(OSError):  # a full disk costs lines, not the run
            self._metrics.write(json.dumps({k: _json_value(v) for k, v in line.items()}) + "\n")
            self._metrics.flush()

    def _write_points(self, step: int, prefix: str, values: Mapping[str, float]) -> None:
        if self._monitor.enabled:
            with contextlib.suppress(OSError):
                start = f"{prefix}/" if prefix else ""
                self._monitor.write_events([(start + name, value, step) for name, value in values.items()])

    def _read_counts(self) -> None:
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                if '"event"' in line:
                    with contextlib.suppress(ValueError):
                        record = json.loads(line)
                        self.restarts = max(self.restarts, record.get("restarts", 0))
                        self.rollbacks = max(self.rollbacks, record.get("rollbacks", 0))


def loop_scalars(health: LoopHealth) -> dict[str, float]:
    """By tag; rounds are counted from 1, blocks from 0 as in names of weights. Rounds without one before are left out.

    `all` stands for the mean over blocks, or the largest. Digits are padded so that tags sort as the loop runs.
    """
    scalars = {}
    for name, rounds in health.per_block.items():
        for r, blocks in enumerate(rounds, start=1):
            for k, value in enumerate(blocks):
                scalars[f"loop_{name}/block{k:02d}/round{r:02d}"] = value
            largest = OVER_BLOCKS[name] == "largest of all blocks"
            scalars[f"loop_{name}/all/round{r:02d}"] = max(blocks) if largest else sum(blocks) / len(blocks)
    for name, values in health.per_round.items():
        for r, value in enumerate(values, start=1):
            scalars[f"loop_{name}/round{r:02d}"] = value
    return {tag: value for tag, value in scalars.items() if not math.isnan(value)}


def _rounded(value: float) -> float:
    """Six significant digits, for lines that people read."""
    return float(f"{value:.6g}")


def _json_value(value: Any) -> Any:
    """JSON has no NaN or infinity; a diverged run must still leave lines that every reader accepts."""
    if isinstance(value, list):
        return [_json_value(item) for item in value]
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


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
