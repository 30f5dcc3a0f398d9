"""metrics.jsonl and progress lines, with DeepSpeed's own monitor on one real rank."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deepspeed.monitor.tensorboard import TensorBoardMonitor

from pretrain.monitor.run_log import RunLog
from pretrain.ranks import Ranks, process_group
from tests.support.ranks import run_ranks
from tests.support.runs import metrics, run_main, small_tree, write_tree


def log_of_a_resumed_run(out: Path) -> None:
    """Steps 3 and 4 of 10, the second one diverged, after an earlier run that reached step 3 and half of 4."""
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    settings: dict[str, Any] = {"tensorboard": {"enabled": False}}
    with process_group(Ranks.from_environment()):
        monitor = MonitorMaster(get_monitor_config(settings))
        for is_main in (True, False):
            log = RunLog(out, monitor, first_step=2, steps=10, tokens_per_step=100, is_main=is_main)
            values = {"loss": 2.5, "lr": 1e-3, "grad_norm": 0.25, "rounds": 2, "flops": 10**15}
            log.training(3, values, 0.5, {"time/step": 0.123456789}, {"bad_steps": 0})
            log.training(4, values | {"loss": math.nan, "grad_norm": math.inf}, 0.5, {}, {"bad_steps": 1})
            log.validation(4, {"a": 2.0, "b": 3.0}, {"a": 0.75, "b": 0.25}, {"a": 4.0, "b": None})
            log.close()


def test_lines_of_a_resumed_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    earlier = [json.dumps({"step": step, "loss": 3.0}) for step in (1, 2, 3)]
    earlier.insert(2, json.dumps({"step": 2, "event": "restart", "restarts": 3, "rollbacks": 1}))
    (out / "metrics.jsonl").write_text("\n".join(earlier) + '\n{"step": 4, "lo')
    (result,) = run_ranks(1, log_of_a_resumed_run, out, folder=tmp_path)

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 2, 3, 4, 4]
    assert lines.pop(2) == {"step": 2, "event": "restart", "restarts": 3, "rollbacks": 1}
    assert lines[:2] == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 3.0}]
    assert lines[2] == {"step": 2, "tokens": 200, "event": "restart", "restarts": 4, "rollbacks": 1}
    assert lines[3] == {
        "step": 3,
        "tokens": 300,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 0.25,
        "rounds": 2,
        "flops": 10**15,
        "tokens_per_second": 200.0,
        "time/step": 0.123457,
    }
    assert (lines[4]["loss"], lines[4]["grad_norm"]) == ("nan", "inf")
    assert lines[5] == {
        "step": 4,
        "tokens": 400,
        "val_loss": 2.25,
        "val_perplexity": math.exp(2.25),
        "val_loss/a": 2.0,
        "val_perplexity/a": math.exp(2.0),
        "val_bits_per_byte/a": 2.0 / math.log(2) / 4.0,
        "val_loss/b": 3.0,
        "val_perplexity/b": math.exp(3.0),
    }

    progress = [line for line in result.stdout.splitlines() if line.startswith("step")]
    assert len(progress) == 3
    assert progress[0].startswith("step  3/10  loss 2.5000  lr 1.00e-03  grad norm 0.250  ")
    assert progress[0].endswith(" left")
    assert progress[1].startswith("step  4/10  loss nan  ")
    assert progress[2] == "step  4/10  validation loss 2.2500"


def full_disk_main(config: Path) -> int:
    """TensorBoard's files cannot be written to from the first step on."""

    def write_events(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch.object(TensorBoardMonitor, "write_events", write_events):
        return run_main(config)


def test_points_that_cannot_be_written_do_not_end_the_run(dataset: Path, tmp_path: Path) -> None:
    """The engine of DeepSpeed writes some of its own in every step."""
    config = write_tree(tmp_path / "run.yaml", small_tree(tmp_path / "out", dataset, steps=3))
    (result,) = run_ranks(1, full_disk_main, config, folder=tmp_path)
    assert result.value == 0
    assert [line["step"] for line in metrics(tmp_path / "out") if "loss" in line] == [1, 2, 3]
