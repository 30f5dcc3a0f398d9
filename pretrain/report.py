"""A run as one page: report.html, which needs nothing but itself. For people who would rather look than read.

    python -m pretrain.report runs/small

A run writes it at its end; the command writes it for one in progress.
"""

from __future__ import annotations

import argparse
import html
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.durable import write_atomic
from deeploop_model.loop_health import PER_BLOCK, PER_ROUND
from pretrain.errors import USER_ERRORS, PretrainError, exit_code_of
from pretrain.monitor.dashboard import TITLES
from pretrain.monitor.heat_map import shade
from pretrain.monitor.run_log import RunLog, clock
from pretrain.monitor.run_metrics import RunMetrics, read_metrics
from pretrain.monitor.svg_chart import chart

REPORT_FILE = "report.html"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 24px auto; padding: 0 16px }
h1 { font-size: 24px } h2 { font-size: 18px; margin-top: 32px; border-bottom: 1px solid #ddd }
svg { margin: 6px 8px 6px 0 }
table { border-collapse: collapse; margin: 6px 24px 16px 0; display: inline-table; vertical-align: top }
caption { text-align: left; font-weight: 600; font-size: 13px; padding: 4px 0 }
td, th { padding: 3px 9px; text-align: right; font-size: 13px } th { font-weight: 400; color: #666 }
table.words td { text-align: left; border-bottom: 1px solid #eee }
pre { background: #f6f6f6; padding: 12px; overflow-x: auto; font-size: 12px }
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pretrain.report", description="Write a run's report.html.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    args = parser.parse_args(argv)
    try:
        print(write_report(args.run))
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code_of(error)
    return 0


def write_report(run: Path) -> Path:
    """Writes the page into the run folder. Raises PretrainError where there are no metrics."""
    metrics = read_metrics(run / "metrics.jsonl")
    config = run / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    write_atomic(run / REPORT_FILE, page(run.resolve().name, metrics, text).encode())
    return run / REPORT_FILE


def close_log(log: RunLog, run: Path, *, is_main: bool) -> None:
    """Closes the log and says, in a line and a page, what came of the run so far."""
    log.close()
    if is_main:
        try:
            log.say(f"{summary(read_metrics(run / 'metrics.jsonl'))}; report: {write_report(run)}")
        except (OSError, PretrainError) as error:  # a full disk costs the report, not the run
            log.say(f"no report: {error}")


def summary(metrics: RunMetrics) -> str:
    """Where the run stands, in a line."""
    loss, best = metrics.last("loss"), metrics.lowest("val_loss")
    seconds = training_seconds(metrics)
    parts = [f"{metrics.step:,} steps, {metrics.tokens:,} tokens"]
    parts += [f"trained for {clock(seconds)}, {metrics.tokens / seconds:,.0f} tokens/s"] if seconds else []
    parts += [] if loss is None else [f"loss {loss:.4f}"]
    parts += [] if best is None else [f"best validation loss {best[1]:.4f} at step {best[0]:,}"]
    named = [
        ("restart", "restart"),
        ("bad_step", "bad step"),
        ("rollback", "rollback"),
        ("collapse", "collapse warning"),
    ]
    parts += [
        plural(metrics.count(event), name) for event, name in named if event != "collapse" or metrics.count(event)
    ]
    return "; ".join(parts)


def training_seconds(metrics: RunMetrics) -> float:
    """Time of all steps that count, without what was done beside them."""
    seconds, before = 0.0, 0
    for step, speed in metrics.points.get("tokens_per_second", []):
        seconds += (step - before) * metrics.tokens / metrics.step / speed
        before = step
    return seconds


def page(name: str, metrics: RunMetrics, config: str) -> str:
    """The whole HTML."""
    points = metrics.points
    both = {"training": points.get("loss", []), "validation": points.get("val_loss", [])}
    bits = {"training": points.get("bits_per_byte", []), "validation": points.get("val_bits_per_byte", [])}
    times = {
        part: points.get(f"time/{part}", []) for part in ("step", "forward", "backward", "optimizer", "data")
    }  # fmt: skip
    charts = [
        chart("loss, nats per token", both),
        chart("bits per byte", bits),
        chart("learning rate", {"": points.get("lr", [])}),
        chart("gradient norm before clipping", {"": points.get("grad_norm", [])}),
        chart("tokens per second", {"": points.get("tokens_per_second", [])}),
        chart("seconds of a step", times),
        chart("utilisation", {"MFU": points.get("speed/mfu", []), "HFU": points.get("speed/hfu", [])}),
    ]
    sections = [
        f"<h1>{html.escape(name)}</h1><p>{html.escape(summary(metrics))}</p>",
        "<h2>Learning and speed</h2>",
        *charts,
        *loop_section(metrics),
        *visit_section(metrics),
        *event_section(metrics),
        f"<h2>Configuration</h2><pre>{html.escape(config)}</pre>" if config else "",
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(name)}</title>'
        f"<style>{STYLE}</style><body>{''.join(sections)}</body></html>\n"
    )


def loop_section(metrics: RunMetrics) -> list[str]:
    """The last measurement as tables, and how rounds came apart over the run."""
    if not metrics.loops:
        return []
    step = max(metrics.loops)
    last = metrics.loops[step]
    rounds = len(last["loss"])
    curves = {
        f"round {r + 1}": [(at, of[r]) for at, of in by_step(metrics, "loss") if r < len(of) and math.isfinite(of[r])]
        for r in range(rounds)
    }
    return [
        f"<h2>Loop health at step {step:,}</h2>",
        *(table(TITLES[name], [last[name]], ["all blocks"]) for name in PER_ROUND),
        *(table(TITLES[name], transposed(last[name])) for name in PER_BLOCK),
        "<br>",
        chart("loss if the loop ended after the round", curves),
    ]


def visit_section(metrics: RunMetrics) -> list[str]:
    """Curves of each sub-layer's gradients."""
    kinds = {
        "kappa/": "kappa_R: alignment of the visits' gradients",
        "stability/": "stability number",
        "grad_norm/": "gradient norm by part",
    }
    charts = []
    for prefix, title in kinds.items():
        named = {n.removeprefix(prefix): p for n, p in sorted(metrics.points.items()) if n.startswith(prefix)}
        charts.append(chart(title, named))
    return ["<h2>Gradients</h2>", *charts] if any(charts) else []


def by_step(metrics: RunMetrics, name: str) -> list[tuple[int, Any]]:
    return [(step, loop[name]) for step, loop in sorted(metrics.loops.items())]


def transposed(rounds: list[list[float]]) -> list[list[float]]:
    """[round][block] as [block][round]."""
    return [list(block) for block in zip(*rounds, strict=True)]


def table(caption: str, rows: list[list[float]], names: list[str] | None = None) -> str:
    """Rows are blocks, columns rounds; cells are coloured between the smallest and the largest."""
    finite = [value for row in rows for value in row if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    head = "".join(f"<th>round {r + 1}</th>" for r in range(len(rows[0])))
    body = ""
    for k, row in enumerate(rows):
        cells = "".join(cell(value, low, high) for value in row)
        body += f"<tr><th>{names[k] if names else f'block {k}'}</th>{cells}</tr>"
    return f"<table><caption>{html.escape(caption)}</caption><tr><th></th>{head}</tr>{body}</table>"


def cell(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return "<td></td>"
    red, green, blue = shade(value, low, high)
    ink = "#000" if 0.3 * red + 0.6 * green + 0.1 * blue > 120 else "#fff"
    return f'<td style="background:rgb({red},{green},{blue});color:{ink}">{value:.4g}</td>'


def event_section(metrics: RunMetrics) -> list[str]:
    """The last things that should not have happened."""
    if not metrics.events:
        return []
    rows = ""
    for event in metrics.events[-50:]:
        more = {key: value for key, value in event.items() if key not in ("step", "event", "sample_ids")}
        told = ", ".join(f"{key}: {value}" for key, value in more.items())
        rows += f"<tr><td>{event['step']:,}</td><td>{html.escape(event['event'])}</td><td>{html.escape(told)}</td></tr>"
    return [f'<h2>Events</h2><table class="words">{rows}</table>']


def plural(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


if __name__ == "__main__":
    sys.exit(main())
