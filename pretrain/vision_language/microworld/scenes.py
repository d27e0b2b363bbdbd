"""Scenes: a few things of known class, colour, size and place. Scene ``i`` depends on the seed and on ``i`` alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pretrain.base.randomness import generator_for

CLASSES = ("ball", "book", "car", "cat", "chair", "cup", "dog", "hat", "lamp", "tree")
COLOURS = ("black", "blue", "green", "red", "white", "yellow")
WIDTH, HEIGHT = 640, 480
"""Of a picture, in pixels."""
FEWEST, MOST = 3, 8
"""Things of a scene."""
MARGIN = 24.0
"""Pixels between two centres from which one thing counts as left of, or above, the other. Closer ones are not asked."""

_COLUMNS, _ROWS = 4, 3
_SIDES = {False: (40, 72), True: (96, 140)}  # of small and large things; both fit a cell of the grid


class Thing(NamedTuple):
    """One thing: its class and colour (places in `CLASSES` and `COLOURS`), its size, and its box in pixels."""

    kind: int
    colour: int
    large: bool
    box: tuple[float, float, float, float]

    @property
    def centre(self) -> tuple[float, float]:
        """Of the box: x and y in pixels, y downwards."""
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2


Scene = tuple[Thing, ...]


def draw_scene(seed: int, number: int, stream: str = "scene") -> Scene:
    """Scene ``number`` of a stream: 3 to 8 things in cells of a grid, so that no box overlaps another.

    A scene takes its things from a few classes and colours of its own, so that it often holds several of a kind.
    """
    rng = generator_for(f"microworld/{stream}", seed, 0, number)
    kinds = rng.choice(len(CLASSES), int(rng.integers(3, 6)), replace=False)
    colours = rng.choice(len(COLOURS), int(rng.integers(2, 5)), replace=False)
    cells = rng.choice(_COLUMNS * _ROWS, int(rng.integers(FEWEST, MOST + 1)), replace=False)
    return tuple(_thing(rng, int(rng.choice(kinds)), int(rng.choice(colours)), int(cell)) for cell in cells)


def _thing(rng: np.random.Generator, kind: int, colour: int, cell: int) -> Thing:
    large = bool(rng.integers(2))
    width, height = (float(rng.integers(*_SIDES[large], endpoint=True)) for _ in range(2))
    across, down = WIDTH / _COLUMNS, HEIGHT / _ROWS
    left = cell % _COLUMNS * across + float(rng.integers(0, int(across - width), endpoint=True))
    top = cell // _COLUMNS * down + float(rng.integers(0, int(down - height), endpoint=True))
    return Thing(kind, colour, large, (left, top, left + width, top + height))
