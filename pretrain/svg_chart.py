"""Curves as SVG that stands in a page by itself."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 46, 40
COLOURS = ("#1f6fb2", "#d1495b", "#3a7d44", "#8e5ea2", "#e08e0b", "#2a9d8f", "#6c757d", "#b5179e")
MOST_POINTS = 600

Points = Sequence[tuple[float, float]]


def chart(title: str, curves: Mapping[str, Points], x_label: str = "step") -> str:
    """Curves over common axes, with a legend where there are several. Empty where there is nothing to draw."""
    curves = {name: thinned(points) for name, points in curves.items() if points}
    if not curves:
        return ""
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    x_range = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    y_range = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (y - y_range[0]) / (y_range[1] - y_range[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}"><text x="8" y="18" class="title">{html.escape(title)}</text>'
    ]
    for tick in y_ticks:
        _, y = place(x_range[0], tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in (tick for tick in x_ticks if x_range[0] <= tick <= x_range[1]):
        x, _ = place(tick, y_range[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{x_label}</text>')
    for index, (name, points) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        if len(points) == 1:
            x, y = place(*points[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        parts.append(f'<polyline points="{path}" stroke="{colour}"><title>{html.escape(name)}</title></polyline>')
        if len(curves) > 1:
            parts.append(legend_entry(name, colour, index, len(curves)))
    return "".join([*parts, "</svg>"])


def legend_entry(name: str, colour: str, index: int, count: int) -> str:
    """One of `count` names in a row under the title; many are told by their curves' tool tips only."""
    if count > len(COLOURS):
        return ""
    x = LEFT + index * min(110, (WIDTH - LEFT - RIGHT) // count)
    return f'<text x="{x}" y="36" style="fill:{colour}" class="name">{html.escape(name)}</text>'


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers that reach from below `low` to above `high`."""
    if high <= low:
        spread = abs(low) or 1.0
        low, high = low - spread / 2, high + spread / 2
    rough = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """Short, as an axis needs it."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.4g}"


def thinned(points: Points) -> Points:
    """At most MOST_POINTS, evenly over the steps, the last one among them."""
    every = -(-len(points) // MOST_POINTS)
    return points if every <= 1 else [*points[::every], points[-1]]
