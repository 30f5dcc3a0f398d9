"""What a run on two ranks writes of itself: metrics.jsonl and event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from deeploop_model.flops import recompute_flops, train_flops
from deeploop_model.loop_health import PER_BLOCK, PER_ROUND
from pretrain import run as run_module
from pretrain.config_file import load_config
from pretrain.engine import train_step
from pretrain.monitor.dashboard import layout
from pretrain.monitor.run_metrics import read_metrics
from pretrain.report import main as report_main
from tests.support.datasets import write_text_dataset
from tests.support.ranks import RankResult, run_ranks
from tests.support.runs import CONTEXT, CPU_CONFIG, metrics, run_main, small_tree, write_tree

STEPS, PEAK_TFLOPS, LIMIT = 6, 0.01, 10.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RankResult]:
    """The folder and rank 0's output of a run that stops after 4 steps, as asked, and goes on to 6."""
    folder = tmp_path_factory.mktemp("monitored")
    write_text_dataset(folder / "data")
    tree: dict[str, Any] = small_tree(folder / "out", folder / "data", steps=STEPS, validate_every=2)
    tree["checkpoint"] = {"every": 0}
    tree["model"]["num_rounds"] = 3
    tree["monitor"] |= {
        "loop_health_every": 2, "detail_every": 2, "kappa_every": 2, "sample_tokens": 4, "peak_tflops": PEAK_TFLOPS,
        "collapse_entropy": LIMIT,
    }  # fmt: skip
    config = write_tree(folder / "run.yaml", tree)
    with_csv = json.loads(CPU_CONFIG.read_text())
    with_csv["csv_monitor"] = {"enabled": True, "output_path": str(folder / "csv"), "job_name": "run"}
    (folder / "ds.json").write_text(json.dumps(with_csv))
    run_ranks(2, asked_to_stop, config, folder / "ds.json", folder=folder)
    results = run_ranks(2, run_with, config, folder / "ds.json", folder=folder)
    assert [result.value for result in results] == [0, 0]
    assert not [line for line in results[1].stdout.splitlines() if line.startswith(("step", "done"))]
    return folder / "out", results[0]


def run_with(config: Path, ds_config: Path) -> int:
    return run_main(config, ds_config=ds_config)


def asked_to_stop(config: Path, ds_config: Path) -> int:
    """A signal comes in step 4."""
    done = 0

    def asking_step(*args: Any) -> torch.Tensor:
        nonlocal done
        done += 1
        if done == 4:
            signal.raise_signal(signal.SIGTERM)
        return train_step(*args)

    with patch.object(run_module, "train_step", asking_step):
        return run_main(config, ds_config=ds_config)


@pytest.fixture(scope="module")
def events(run: tuple[Path, RankResult]) -> EventAccumulator:
    accumulator = EventAccumulator(str(run[0] / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def points(events: EventAccumulator, tag: str) -> list[tuple[int, Any]]:
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_loss_has_other_units_in_training_and_validation(
    events: EventAccumulator, run: tuple[Path, RankResult]
) -> None:
    manifest = json.loads((run[0].parent / "data/manifest.json").read_text())
    for split, prefix, steps in (("train", "train", range(1, STEPS + 1)), ("validation", "validation", (2, 4, 6))):
        losses = points(events, f"{prefix}/loss")
        assert [step for step, _ in losses] == list(steps)
        assert points(events, f"{prefix}/perplexity") == [(s, pytest.approx(math.exp(v), rel=1e-5)) for s, v in losses]
        part = manifest["splits"][split]
        bits = [(s, pytest.approx(v / math.log(2) * part["tokens"] / part["text_bytes"], rel=1e-5)) for s, v in losses]
        assert points(events, f"{prefix}/bits_per_byte") == bits


def test_loop_health_of_every_block_and_round(events: EventAccumulator, run: tuple[Path, RankResult]) -> None:
    """Scalars and lists say the same; the loss after the last round is near the validation loss."""
    metrics = read_metrics(run[0] / "metrics.jsonl")
    assert sorted(metrics.loops) == [2, 4, 6]
    for name in PER_BLOCK:
        first = 2 if name in ("state_change", "state_cosine") else 1
        for r in range(3):
            for k in range(2):
                tag = f"loop_{name}/block{k:02d}/round{r + 1:02d}"
                expected = [(s, pytest.approx(metrics.loops[s][name][r][k], rel=1e-5)) for s in (2, 4, 6)]
                assert (points(events, tag) if tag in events.Tags()["scalars"] else None) == (
                    expected if r + 1 >= first else None
                )
        means = [np.mean(metrics.loops[step][name][2]) for step in (2, 4, 6)]
        over_blocks = [value for _, value in points(events, f"loop_{name}/all/round03")]
        if name == "attention_logit":
            assert over_blocks == pytest.approx([max(metrics.loops[step][name][2]) for step in (2, 4, 6)], rel=1e-5)
        else:
            assert over_blocks == pytest.approx(means, rel=1e-5)
    for name in PER_ROUND:
        assert [step for step, _ in points(events, f"loop_{name}/round03")] == [2, 4, 6]
    last, validation = points(events, "loop_loss/round03"), points(events, "validation/loss")
    assert [value for _, value in last] == pytest.approx([value for _, value in validation], rel=0.1)


def test_pictures_texts_hyperparameters_and_layout_are_in_their_tabs(events: EventAccumulator) -> None:
    tags = events.Tags()
    assert sorted(tags["images"]) == sorted(f"loop/{name}" for name in PER_BLOCK)
    pictures = events.Images("loop/state_change")
    assert [picture.step for picture in pictures] == [2, 4, 6]
    assert pictures[0].encoded_image_string.startswith(b"\x89PNG")
    assert (pictures[0].width, pictures[0].height) == (336, 56 + 2 * 24 + 36)
    (sample,) = events.Tensors("sample/text_summary")
    assert sample.step == STEPS
    assert "num_rounds: 3" in events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    session = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert session.hparams["model.num_rounds"].number_value == 3
    assert session.hparams["N"].number_value == 6
    charts = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in charts.category] == list(layout())


def test_every_chart_of_the_layout_finds_points(events: EventAccumulator) -> None:
    """Patterns are matched from the start of a tag, as TensorBoard does."""
    tags = events.Tags()["scalars"]
    for charts in layout().values():
        for title, (_, patterns) in charts.items():
            for pattern in patterns:
                assert any(re.match(pattern, tag) for tag in tags), f"{title}: {pattern}"


def test_speed_times_and_utilisation(events: EventAccumulator, run: tuple[Path, RankResult]) -> None:
    config = load_config(run[0].parent / "run.yaml")
    seconds = dict(points(events, "time/step"))
    assert sorted(seconds) == list(range(1, STEPS + 1))
    tokens = 8 * CONTEXT
    for step, speed in points(events, "speed/tokens_per_second_per_device"):
        assert speed == pytest.approx(tokens / seconds[step] / 2, rel=1e-4)
    for tag, flops in (
        ("mfu", train_flops(config.model)),
        ("hfu", train_flops(config.model) + recompute_flops(config.model, "round")),
    ):
        for step, share in points(events, f"speed/{tag}"):
            assert share == pytest.approx(flops * tokens / seconds[step] / (2 * PEAK_TFLOPS * 1e12), rel=1e-4)
    parts = [dict(points(events, f"time/{part}")) for part in ("data", "forward", "backward", "optimizer")]
    for step, whole in seconds.items():
        assert 0.3 * whole < sum(part[step] for part in parts) < whole
    for beside in ("validation", "loop_health"):
        assert {step for step, _ in points(events, f"time/{beside}")} <= set(range(1, STEPS + 1))
    assert [step for step, _ in points(events, "time/communication")] == [2, 4, 6]
    assert all(value > 0 for _, value in points(events, "memory/peak_resident_gib"))


def test_gradient_norms_of_parts_add_up_to_the_global_norm(events: EventAccumulator) -> None:
    parts = [dict(points(events, tag)) for tag in events.Tags()["scalars"] if tag.startswith("grad_norm/")]
    assert len(parts) == 2 + 2 * 2  # embedding, its norm, two sub-layers of two blocks
    whole = dict(points(events, "train/grad_norm"))
    for step in (2, 4, 6):
        assert sum(part[step] ** 2 for part in parts) ** 0.5 == pytest.approx(whole[step], rel=1e-3)


def test_restarts_and_collapse_warnings_are_counted_logged_and_printed(
    events: EventAccumulator, run: tuple[Path, RankResult]
) -> None:
    out, result = run
    metrics = read_metrics(out / "metrics.jsonl")
    (restart,) = [line for line in metrics.events if line["event"] == "restart"]
    assert restart == {"step": restart["step"], "event": "restart", "restarts": 1, "rollbacks": 0}
    assert restart["step"] == 4
    assert points(events, "events/restarts") == [(s, float(s > restart["step"])) for s in range(1, STEPS + 1)]
    for name in ("bad_steps", "skipped_steps", "rollbacks"):
        assert points(events, f"events/{name}") == [(step, 0.0) for step in range(1, STEPS + 1)]
    assert points(events, "events/collapsed_attention_entropy") == [(2, 1.0), (4, 1.0), (6, 1.0)]
    assert [line["step"] for line in metrics.events if line["event"] == "collapse"] == [2, 4, 6]
    (warning,) = [line for line in result.stdout.splitlines() if "collapse:" in line]
    assert warning.startswith("step 6/6  collapse: attention looks at one token: attention_entropy ")
    assert warning.endswith(f"is under monitor.collapse_entropy {LIMIT:g} (6 of 6 places are)")


def test_measuring_changes_no_bit_of_training(run: tuple[Path, RankResult], tmp_path: Path) -> None:
    """A run at once and without measurements has the losses and norms of the measured, stopped and resumed one."""
    tree = yaml.safe_load((run[0].parent / "run.yaml").read_text())
    tree["out"] = str(tmp_path / "out")
    tree["monitor"] = {"log_every": 1, "loop_health_every": 0, "detail_every": 0, "sample_tokens": 0}
    run_ranks(2, run_main, write_tree(tmp_path / "run.yaml", tree), folder=tmp_path)
    plain = metrics(tmp_path / "out")
    assert len(plain) == STEPS + 3
    assert plain == [line for line in metrics(run[0]) if "loss" in line or "val_loss" in line]


def test_other_services_of_deepspeed_get_the_same_points(
    events: EventAccumulator, run: tuple[Path, RankResult]
) -> None:
    folder = run[0].parent / "csv/run"
    for tag in ("train/loss", "validation/bits_per_byte", "loop_state_norm/block01/round03", "time/communication"):
        lines = [line.split(",") for line in (folder / f"{tag.replace('/', '_')}.csv").read_text().split()]
        found = [(int(step), pytest.approx(float(value), rel=1e-5)) for step, value in lines if step.isdigit()]
        assert points(events, tag) == found


def test_end_is_told_in_a_line_and_a_page(run: tuple[Path, RankResult], capsys: pytest.CaptureFixture[str]) -> None:
    out, result = run
    *_, told, done = [line for line in result.stdout.splitlines() if line]
    assert done.startswith("done: 6 steps; run folder ")
    metrics = read_metrics(out / "metrics.jsonl")
    best = metrics.lowest("val_loss")
    assert best is not None
    assert told.startswith("6 steps, 768 tokens; trained for 0:")
    assert f"best validation loss {best[1]:.4f} at step {best[0]}; 1 restart; 0 bad steps; 0 rollbacks; 3 coll" in told
    assert told.endswith(f"report: {out / 'report.html'}")
    page = (out / "report.html").read_text(encoding="utf-8")
    (out / "report.html").unlink()
    assert report_main([str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'report.html'}\n"
    assert (out / "report.html").read_text(encoding="utf-8") == page
