"""Scenes: a few things of known class, colour, size and place. Scene ``i`` depends on the seed and on ``i`` alone."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from pretrain.vision_language.microworld.draws import random_for

CLASSES = ("ball", "book", "car", "cat", "chair", "cup", "dog", "hat", "lamp", "tree")
COLOURS = ("black", "blue", "green", "red", "white", "yellow")
WIDTH, HEIGHT = 640, 480
"""Size of a picture in pixels."""
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
        """Centre of the box: x and y in pixels, y downwards."""
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2


Scene = tuple[Thing, ...]


def draw_scene(seed: int, number: int, stream: str = "scene") -> Scene:
    """Scene ``number`` of a stream: 3 to 8 things in cells of a grid, so that no box overlaps another.

    A scene takes its things from a few classes and colours of its own, so that it often holds several of a kind.
    """
    rng = random_for(stream, seed, number)
    kinds = rng.sample(range(len(CLASSES)), rng.randint(3, 5))
    colours = rng.sample(range(len(COLOURS)), rng.randint(2, 4))
    cells = rng.sample(range(_COLUMNS * _ROWS), rng.randint(FEWEST, MOST))
    return tuple(_thing(rng, rng.choice(kinds), rng.choice(colours), cell) for cell in cells)


def _thing(rng: Random, kind: int, colour: int, cell: int) -> Thing:
    large = rng.random() < 0.5
    width, height = (rng.randint(*_SIDES[large]) for _ in range(2))
    across, down = WIDTH // _COLUMNS, HEIGHT // _ROWS
    left = cell % _COLUMNS * across + rng.randint(0, across - width)
    top = cell // _COLUMNS * down + rng.randint(0, down - height)
    return Thing(kind, colour, large, (left, top, left + width, top + height))
