"""A table of numbers by round and block as a picture: colour for the whole, digits where they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 44, 24
"""Of a cell in pixels."""
LEFT, TOP, BOTTOM = 58, 56, 36
SMALLEST = 336
"""Width of a picture, as of TensorBoard's cards: wider ones are shown smaller there, and lose the shapes of letters."""
CELLS_WIDE, CELLS_HIGH = 24, 48
"""More than that are drawn smaller, without digits."""
COLOURS = np.array(
    [[13, 8, 135], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]], dtype=np.float64
)  # the five corners of Matplotlib's map `plasma`, which is even to the eye and readable without red and green
GREY = (225, 225, 225)


def heat_map(title: str, values: Sequence[Sequence[float]]) -> NDArray[np.uint8]:
    """[round][block] numbers as a picture [height, width, 3]; grey where there is none (nan).

    Blocks go down as in a table of layers, rounds to the right as time does.
    """
    cells_KR = np.array(values, dtype=np.float64).T
    blocks, rounds = cells_KR.shape
    width, height = max(6, min(WIDTH, WIDTH * CELLS_WIDE // rounds)), max(6, min(HEIGHT, HEIGHT * CELLS_HIGH // blocks))
    font, digits = ImageFont.load_default(size=12), width == WIDTH and height == HEIGHT
    size = (max(LEFT + rounds * width + 8, SMALLEST), TOP + blocks * height + BOTTOM)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.text((6, 8), title, fill="black", font=ImageFont.load_default(size=13))
    finite = cells_KR[np.isfinite(cells_KR)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    for k in range(blocks):
        for r in range(rounds):
            value = float(cells_KR[k, r])
            left, top = LEFT + r * width, TOP + k * height
            colour = shade(value, low, high)
            draw.rectangle((left, top, left + width - 1, top + height - 1), fill=colour)
            if digits and np.isfinite(value):
                ink = "black" if 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] > 120 else "white"
                draw.text((left + width / 2, top + height / 2), f"{value:.3g}", fill=ink, font=font, anchor="mm")
    for k in range(0, blocks, max(1, 16 // height)):
        draw.text((LEFT - 6, TOP + (k + 0.5) * height), f"block {k}", fill="black", font=font, anchor="rm")
    every = max(1, -(-30 // width))
    for r in range(0, rounds, every):
        label = f"{r + 1}" if r else "round 1"
        draw.text((LEFT + (r + 0.5) * width, TOP - 6), label, fill="black", font=font, anchor="mb")
    draw_scale(draw, low, high, top=size[1] - BOTTOM + 12, font=font)
    return np.asarray(image)


def shade(value: float, low: float, high: float) -> tuple[int, int, int]:
    """The colour of a value between two ends."""
    if not np.isfinite(value):
        return GREY
    place = (value - low) / (high - low) if high > low else 0.5
    red, green, blue = (int(np.interp(place, np.linspace(0, 1, len(COLOURS)), COLOURS[:, c])) for c in range(3))
    return red, green, blue


def draw_scale(draw: ImageDraw.ImageDraw, low: float, high: float, *, top: int, font: Any) -> None:
    """What the colours mean."""
    draw.text((LEFT - 8, top + 8), f"{low:.3g}", fill="black", font=font, anchor="rm")
    for x in range(200):
        draw.line((LEFT + x, top, LEFT + x, top + 16), fill=shade(x / 199, 0.0, 1.0))
    draw.text((LEFT + 208, top + 8), f"{high:.3g}", fill="black", font=font, anchor="lm")
