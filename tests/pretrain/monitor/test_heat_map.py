"""Pictures of tables: colours at their places."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pretrain.monitor.heat_map import COLOURS, GREY, HEIGHT, LEFT, TOP, WIDTH, heat_map


def corner(
    picture: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], r: int, k: int, width: int, height: int
) -> list[int]:
    """A pixel near the corner of the cell, where no digit is."""
    return [int(value) for value in picture[TOP + k * height + 1, LEFT + r * width + 1]]


def test_ends_of_the_scale_and_missing_values() -> None:
    picture = heat_map("title", [[math.nan, 0.0], [2.0, 1.0], [0.0, 2.0]])
    low, middle, high = (list(map(int, COLOURS[index])) for index in (0, 2, 4))
    assert corner(picture, 0, 0, WIDTH, HEIGHT) == list(GREY)
    assert corner(picture, 0, 1, WIDTH, HEIGHT) == low
    assert corner(picture, 1, 0, WIDTH, HEIGHT) == high
    assert corner(picture, 1, 1, WIDTH, HEIGHT) == middle
    assert corner(picture, 2, 0, WIDTH, HEIGHT) == low


@pytest.mark.parametrize(("rounds", "blocks"), [(1, 1), (64, 2), (3, 96), (300, 1)])
def test_large_tables_stay_small_pictures(rounds: int, blocks: int) -> None:
    picture = heat_map("title", [[float(r + k) for k in range(blocks)] for r in range(rounds)])
    assert picture.shape[0] < 1600
    assert picture.shape[1] < 2000
    assert picture.dtype == np.uint8


def test_no_number_at_all() -> None:
    assert heat_map("title", [[math.nan, math.nan]]).shape[2] == 3
