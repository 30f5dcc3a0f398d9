"""The study's pictures: loss against every axis of numbers, and loss against tokens. One PNG per grid and axis."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretrain.ablate.results import Cell, Result, cells
from pretrain.ablate.study import Study
from pretrain.ablate.table import ROW_LABELS

X_LABELS = {"rounds": "R, rounds", "p": "p, exponent of the residual rule"}
LINE_STYLES = {None: "-", "equal_flops_more_tokens": "--", "equal_flops_unshared": ":"}
MARKERS = "osDv^P*<>h"


def write_plots(study: Study, results: Sequence[Result]) -> list[Path]:
    """Writes what there is something to draw for; returns the files."""
    written: list[Path] = []
    for grid in study.grids:
        of_grid = [result for result in results if result.run.setting.grid == grid]
        for axis, value_of in _axes(cells(of_grid)).items():
            name = f"{grid}-loss-by-{axis.rpartition('.')[2]}.png"
            with _figure(Path(study.out) / name, written) as axes:
                _against(axes, axis, value_of, cells(of_grid))
        if any(result.curve for result in of_grid):
            with _figure(Path(study.out) / f"{grid}-loss-by-tokens.png", written) as axes:
                _curves(axes, of_grid)
    return written


Colour = tuple[float, float, float, float]
Value = Callable[[Cell], float | None]


def _axes(of_grid: Sequence[Cell]) -> dict[str, Value]:
    """Axes along which at least two settings are numbers, and how a cell tells its place."""
    found: dict[str, Value] = {
        "rounds": lambda cell: float(cell.setting.rounds),
        "p": lambda cell: None if cell.setting.control else cell.first.exponent,
    }
    for key, _ in of_grid[0].setting.further if of_grid else ():
        found[key] = lambda cell, key=key: _number(dict(cell.setting.further)[key])  # type: ignore[misc]
    return {
        axis: value_of for axis, value_of in found.items() if len({value_of(cell) for cell in of_grid} - {None}) > 1
    }


def _against(axes: Axes, axis: str, value_of: Value, of_grid: Sequence[Cell]) -> None:
    """Mean and standard deviation over seeds; a cross, at the threshold, where seeds diverged."""
    threshold = min(result.threshold for cell in of_grid for result in cell.results)
    series: dict[str, list[tuple[float, Cell]]] = {}
    for cell in of_grid:
        place = value_of(cell)
        if place is not None and cell.unfinished < len(cell.results):
            series.setdefault(_label(cell, without=axis), []).append((place, cell))
    for number, (label, points) in enumerate(series.items()):
        points.sort(key=lambda point: point[0])
        colour = _colour(number)
        kept = [(place, cell.mean, cell.spread or 0.0) for place, cell in points if cell.mean is not None]
        axes.errorbar(
            [place for place, _, _ in kept],
            [mean for _, mean, _ in kept],
            yerr=[spread for _, _, spread in kept],
            label=label, color=colour, capsize=3, markersize=5, marker=MARKERS[number % len(MARKERS)],
            linestyle=LINE_STYLES[points[0][1].setting.control],
        )  # fmt: skip
        for place, cell in points:
            if cell.diverged:
                axes.plot(place, threshold, "x", color=colour, markersize=9 + number, markeredgewidth=2)
                axes.annotate(f"{cell.diverged}/{len(cell.results)}", (place, threshold), color=colour,
                              xytext=(5, 6 + 11 * number), textcoords="offset points", fontsize=8)  # fmt: skip
    if any(cell.diverged for cell in of_grid):
        axes.axhline(threshold, color="grey", linewidth=0.8, linestyle=(0, (1, 3)))
        axes.plot([], [], "x", color="grey", label="diverged (of all seeds)")
    if "lr" in axis:
        axes.set_xscale("log")
    elif axis == "rounds":
        axes.set_xticks(sorted({cell.setting.rounds for cell in of_grid}))
    axes.set_xlabel(X_LABELS.get(axis, axis))


def _curves(axes: Axes, of_grid: Sequence[Result]) -> None:
    """Validation losses of every run; the seeds of a setting share a colour."""
    labels: dict[str, Colour] = {}
    for cell in cells(of_grid):
        label = _label(cell, without=None)
        for result in cell.results:
            points = [(tokens, loss) for tokens, loss in result.curve if math.isfinite(loss)]
            if not points:
                continue
            axes.plot(
                [tokens for tokens, _ in points],
                [loss for _, loss in points],
                label=None if label in labels else label,
                color=labels.setdefault(label, _colour(len(labels))),
                linestyle=LINE_STYLES[cell.setting.control], linewidth=1.2, marker=".",
            )  # fmt: skip
            if result.divergence:
                axes.plot(*points[-1], "x", color=labels[label], markersize=9, markeredgewidth=2)
    axes.set_xlabel("training tokens")


def _colour(number: int) -> Colour:
    """Ten strong colours, then their ten light ones."""
    return mpl.colormaps["tab20"](2 * number % 20 + number // 10 % 2)


def _label(cell: Cell, without: str | None) -> str:
    """All of a setting but the value of one axis."""
    setting = cell.setting
    parts = [] if without == "p" else [setting.rule]
    parts += [] if without == "rounds" else [f"R = {setting.rounds}"]
    parts += [f"{key.rpartition('.')[2]} {value}" for key, value in setting.further if key != without]
    parts += [ROW_LABELS[setting.control]] if setting.control else []
    return ", ".join(parts)


@contextlib.contextmanager
def _figure(path: Path, written: list[Path]) -> Iterator[Axes]:
    """A figure with the axes that all pictures share, saved at the end under `path`."""
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        axes.set_ylabel("validation loss, nats per token")
        axes.grid(alpha=0.3)
        yield axes
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format="png")
        temporary.replace(path)
        written.append(path)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
