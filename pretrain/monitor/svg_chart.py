"""Curves as SVG that stands in a page by itself."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

MOST_POINTS = 600
MOST_NAMES = 10
"""More curves than that have no legend; their names are their lines' ids."""

Points = Sequence[tuple[float, float]]


def chart(title: str, curves: Mapping[str, Points], x_label: str = "step") -> str:
    """Curves over common axes, with a legend where there are several. Empty where there is nothing to draw."""
    drawn = {name: thinned(points) for name, points in curves.items() if points}
    if not drawn:
        return ""
    figure = Figure(figsize=(5.6, 2.7), layout="constrained")
    axes = figure.subplots()
    for name, points in drawn.items():
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, marker="o" if len(points) == 1 else "", linewidth=1.3, label=name, gid=f"curve {name}")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if 1 < len(drawn) <= MOST_NAMES:
        axes.legend(fontsize=8, ncols=2, frameon=False)
    written = io.StringIO()
    # Text as text, and ids that differ between the charts of a page but not between two writings of one.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    svg = written.getvalue()
    return svg[svg.index("<svg") :]


def thinned(points: Points) -> Points:
    """At most MOST_POINTS, evenly over the steps, the last one among them."""
    every = -(-len(points) // MOST_POINTS)
    return points if every <= 1 else [*points[::every], points[-1]]
