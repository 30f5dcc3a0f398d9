"""The report page: what it shows of a run in any state, parsed."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.run_metrics import read_metrics
from pretrain.monitor.svg_chart import chart, thinned
from pretrain.report import main, summary, write_report


class Page(HTMLParser):
    """Open tags are closed in order; texts and numbers of elements are kept."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def write_metrics(run: Path, lines: list[dict[str, Any]]) -> None:
    run.mkdir(exist_ok=True)
    text = "".join(json.dumps({"tokens": line["step"] * 100, **line}) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '{"step": 9, "los')  # a run is writing


LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 4.0, "lr": 1e-3, "tokens_per_second": 50.0, "time/step": 2.0},
    {"step": 2, "loss": "nan", "lr": 2e-3, "tokens_per_second": 100.0},
    {"step": 2, "event": "bad_step", "bad_steps": 1, "fault": "loss <spike>", "sample_ids": ["a:1"]},
    {"step": 4, "loss": 3.0, "lr": 1e-3, "tokens_per_second": 200.0},
    {"step": 4, "val_loss": 3.25},
    {"step": 4, "kappa/blocks.0.attention": 3.5, "stability/blocks.0.attention": 0.05},
    {"step": 4, "loop/loss": [3.5, 3.25], "loop/prediction_kl": ["nan", 0.1],
     **{f"loop/{name}": [[0.5, 1.5], [0.75, 2.5]] for name in ("state_norm", "attention_entropy", "attention_logit")},
     **{f"loop/{name}": [["nan", "nan"], [0.125, 0.25]] for name in ("state_change", "state_cosine")}},
]  # fmt: skip


def test_page_holds_curves_tables_and_events(tmp_path: Path) -> None:
    run = tmp_path / "a<b"
    write_metrics(run, LINES)
    (run / "config.yaml").write_text("# git abc\nout: x<y\n")
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert page.open == []
    assert page.links == []  # nothing from elsewhere
    assert page.counts["svg"] == 5 + 2  # loss, learning rate, speed, step time, loss by round; kappa, stability
    assert page.counts["table"] == 7 + 1
    assert page.texts.count("block 1") == 5
    for text in ("a<b", "# git abc\nout: x<y", "0.125", "bad_steps: 1, fault: loss <spike>", "Loop health at step 4"):
        assert text in page.texts
    told = "4 steps, 400 tokens; trained for 0:04, 100 tokens/s; loss 3.0000; best validation loss 3.2500 at step 4; "
    assert told + "0 restarts; 1 bad step; 0 rollbacks" in page.texts


def test_run_that_has_just_begun(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", [])
    assert Page(write_report(tmp_path / "run").read_text(encoding="utf-8")).open == []
    assert (
        summary(read_metrics(tmp_path / "run/metrics.jsonl"))
        == "0 steps, 0 tokens; 0 restarts; 0 bad steps; 0 rollbacks"
    )


def test_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {tmp_path}/metrics.jsonl: No such file or directory; a run folder"
    )


def test_charts_of_one_point_many_points_and_none() -> None:
    assert chart("nothing", {"a": []}) == ""
    assert '<g id="curve a">' in chart("one", {"a": [(1, 2.0)]})
    many = [(step, float(step)) for step in range(5000)]
    assert len(thinned(many)) <= 601
    assert thinned(many)[-1] == many[-1]
    drawn = chart("<many>", {"a": many, "b": many[:10]})
    assert "&lt;many&gt;" in drawn
    assert drawn.count('<g id="curve ') == 2
    assert drawn == chart("<many>", {"a": many, "b": many[:10]})
