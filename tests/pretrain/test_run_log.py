"""metrics.jsonl and progress lines, with DeepSpeed's own monitor on one real rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pretrain.ranks import Ranks, process_group
from pretrain.run_log import RunLog
from tests.support.ranks import run_ranks


def log_of_a_resumed_run(out: Path) -> None:
    """Steps 3 and 4 of 10, the second one diverged, after an earlier run that reached step 3 and half of 4."""
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    settings: dict[str, Any] = {"tensorboard": {"enabled": False}}
    with process_group(Ranks.from_environment()):
        monitor = MonitorMaster(get_monitor_config(settings))
        for is_main in (True, False):
            log = RunLog(out, monitor, first_step=2, steps=10, tokens_per_step=100, is_main=is_main)
            log.training(3, loss=2.5, lr=1e-3, grad_norm=0.25, counts={"rounds": 2, "flops": 10**15})
            log.training(4, loss=math.nan, lr=1e-3, grad_norm=math.inf, counts={"rounds": 3, "flops": 2 * 10**15})
            log.validation(4, {"a": 2.0, "b": 3.0}, {"a": 0.75, "b": 0.25})
            log.close()


def test_lines_of_a_resumed_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    earlier = [json.dumps({"step": step, "loss": 3.0}) for step in (1, 2, 3)]
    (out / "metrics.jsonl").write_text("\n".join(earlier) + '\n{"step": 4, "lo')
    (result,) = run_ranks(1, log_of_a_resumed_run, out, folder=tmp_path)

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert lines[:2] == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 3.0}]
    assert lines[2].pop("tokens_per_second") > 0
    assert lines[2] == {
        "step": 3,
        "tokens": 300,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 0.25,
        "rounds": 2,
        "flops": 10**15,
    }
    assert (lines[3]["loss"], lines[3]["grad_norm"]) == ("nan", "inf")
    assert lines[4] == {"step": 4, "tokens": 400, "val_loss": 2.25, "val_loss/a": 2.0, "val_loss/b": 3.0}

    progress = [line for line in result.stdout.splitlines() if line.startswith("step")]
    assert len(progress) == 3
    assert progress[0].startswith("step  3/10  loss 2.5000  lr 1.00e-03  grad norm 0.250  ")
    assert progress[0].endswith(" left")
    assert progress[1].startswith("step  4/10  loss nan  ")
    assert progress[2] == "step  4/10  validation loss 2.2500"
