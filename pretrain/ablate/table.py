"""The study's tables: `table.md` for people, `table.csv` with the same rows, `runs.csv` with every run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from data_prep.durable import write_atomic
from pretrain.ablate.results import Cell, Result, cells
from pretrain.ablate.study import Control, Study

ROW_LABELS: dict[Control, str] = {
    "equal_flops_more_tokens": "unlooped, equal FLOPs by more tokens",
    "equal_flops_unshared": "unlooped, equal FLOPs by K*R blocks of their own weights",
}


def write_tables(study: Study, results: Sequence[Result]) -> None:
    out = Path(study.out)
    write_atomic(out / "table.md", markdown(study, results).encode())
    write_atomic(out / "table.csv", settings_csv(cells(results)).encode())
    write_atomic(out / "runs.csv", runs_csv(results).encode())


def markdown(study: Study, results: Sequence[Result]) -> str:
    """Per grid: losses by rule and R, then parameters, tokens and FLOPs of every setting."""
    states = {result.run.config.out: result.state for result in results}
    done = sum(state.is_result for state in states.values())
    lines = [
        "# Validation loss by residual rule and rounds",
        "",
        "In nats per token after the last step: mean ± standard deviation over the seeds that did not diverge.",
        "R = 1 is the unlooped model of equal stored parameters.",
        divergence_rule(study, results),
        f"{done} of {len(states)} runs are finished.",
    ]
    for grid in study.grids:
        of_grid = [cell for cell in cells(results) if cell.setting.grid == grid]
        lines += ["", f"## {grid}", "", *_by_rounds(of_grid), "", *_details(of_grid)]
    return "\n".join(lines) + "\n"


def divergence_rule(study: Study, results: Sequence[Result]) -> str:
    thresholds = sorted({f"{result.threshold:.3f}" for result in results})
    origin = (
        f"{study.divergence.margin:g} below the loss of a unigram model"
        if study.divergence.val_loss is None
        else "given"
    )
    return (
        "A run diverged if it gave up after bad steps, or its last validation loss is not finite or not below "
        f"{' or '.join(thresholds)} ({origin})."
    )


def _by_rounds(of_grid: Sequence[Cell]) -> list[str]:
    """A row per rule, control and further values; a column per R."""
    columns = sorted({cell.setting.rounds for cell in of_grid})
    rows: dict[str, dict[int, Cell]] = {}
    for cell in sorted(of_grid, key=lambda cell: cell.setting.control is not None):
        rows.setdefault(series_label(cell), {})[cell.setting.rounds] = cell
    header = ["", *(f"R = {rounds}" for rounds in columns)]
    body = [[label, *(_loss(row[r]) if r in row else "" for r in columns)] for label, row in rows.items()]
    return _table(header, body)


def series_label(cell: Cell) -> str:
    """All of a setting but R."""
    setting = cell.setting
    further = [f"{key.rpartition('.')[2]} {value}" for key, value in setting.further]
    control = [ROW_LABELS[setting.control]] if setting.control else []
    return ", ".join([setting.rule, *further, *control])


def _details(of_grid: Sequence[Cell]) -> list[str]:
    header = ["setting", "K", "R", "N", "stored parameters", "tokens", "training FLOPs", "seeds", "diverged", "loss"]
    body = []
    for cell in of_grid:
        model = cell.first.config.model
        beside = f" beside R = {cell.setting.rounds}" if cell.setting.control else ""
        seeds = f"{len(cell.results)}" + (f" ({cell.unfinished} unfinished)" if cell.unfinished else "")
        body.append(
            [series_label(cell) + beside, f"{model.num_blocks}", f"{model.num_rounds}", f"{model.unrolled_depth}",
             f"{cell.stored_parameters:,}", f"{cell.first.tokens:,}", f"{cell.first.flops:.5g}", seeds,
             f"{cell.diverged}", _loss(cell)]
        )  # fmt: skip
    return _table(header, body)


def _loss(cell: Cell) -> str:
    """`2.863 ± 0.004`, with what is missing or diverged behind it."""
    parts = []
    if cell.mean is not None:
        parts.append(f"{cell.mean:.4f}" + (f" ± {cell.spread:.4f}" if cell.spread is not None else ""))
    if cell.diverged:
        ends = [f"{result.final_loss:.2f}" for result in cell.results if result.divergence and result.final_loss]
        reached = f" at {', '.join(ends)}" if ends else ""
        parts.append(f"{cell.diverged} of {len(cell.results)} diverged{reached}")
    if cell.unfinished:
        parts.append(f"{cell.unfinished} of {len(cell.results)} unfinished")
    return "; ".join(parts)


def _table(header: list[str], body: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *body]]


def settings_csv(of_study: Sequence[Cell]) -> str:
    """A line per setting."""
    keys = sorted({key for cell in of_study for key, _ in cell.setting.further})
    header = ["grid", "rule", "p", "rounds", "control", *keys, "K", "R", "N", "stored_parameters", "tokens",
              "train_flops", "seeds", "unfinished", "diverged", "val_loss_mean", "val_loss_sd"]  # fmt: skip
    rows = []
    for cell in of_study:
        setting, model, further = cell.setting, cell.first.config.model, dict(cell.setting.further)
        rows.append(
            [setting.grid, setting.rule, cell.first.exponent, setting.rounds, setting.control,
             *(further.get(key) for key in keys), model.num_blocks, model.num_rounds, model.unrolled_depth,
             cell.stored_parameters, cell.first.tokens, cell.first.flops, len(cell.results), cell.unfinished,
             cell.diverged, cell.mean, cell.spread]
        )  # fmt: skip
    return _csv(header, rows)


def runs_csv(results: Sequence[Result]) -> str:
    """A line per run."""
    header = ["grid", "run", "seed", "state", "val_loss", "divergence", "folder"]
    rows = [
        [result.run.setting.grid, result.run.name, result.run.config.train.seed, result.state.value,
         result.final_loss, result.divergence, result.run.config.out]
        for result in results
    ]  # fmt: skip
    return _csv(header, rows)


def _csv(header: list[str], rows: Sequence[Sequence[object]]) -> str:
    """Empty where there is nothing to say."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if value is None else value for value in row] for row in rows])
    return text.getvalue()
