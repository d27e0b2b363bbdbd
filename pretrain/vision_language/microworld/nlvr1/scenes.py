"""Scenes of three boxes of 100 x 100 pixels, as NLVR v1 has them: scattered objects, or towers of blocks.

Places follow the real data: a fifth of the scattered objects lie exactly at the right edge, a fifth at the bottom, the
others anywhere; blocks of towers are squares of 20 pixels, one pixel apart, in the middle of the box.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

SIDE = 100
"""Of a box, in pixels."""
COLOURS = ("black", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")
SIZES = (10, 20, 30)
TALLEST, MOST = 4, 7
"""Blocks of a tower; scattered objects of a box."""
TOUCHING = 0.5
"""Pixels from an edge at most for an object that touches it."""

_BLOCK, _PITCH, _TOWER_X, _TOWER_Y = 20, 21, 40, 80
_AT_EDGE = 0.19
_HEX = {"black": "Black", "blue": "#0099ff", "yellow": "Yellow"}


class Item(NamedTuple):
    """An object: the pixels of its upper left corner in its box (y downwards), its size, shape and colour."""

    x: int
    y: int
    size: int
    shape: str
    colour: str

    def distances(self) -> dict[str, int]:
        """Pixels from each edge of the box."""
        return {"left": self.x, "top": self.y, "right": SIDE - self.x - self.size, "bottom": SIDE - self.y - self.size}

    def touches(self, where: str) -> bool:
        """Whether it touches ``left``, ``top``, ``right``, ``bottom``, any ``edge``, or a ``corner``."""
        touched = {edge for edge, distance in self.distances().items() if distance <= TOUCHING}
        if where == "corner":
            return bool(touched & {"left", "right"}) and bool(touched & {"top", "bottom"})
        return bool(touched) if where == "edge" else where in touched


Box = tuple[Item, ...]
"""Of a tower: from the base upwards."""
Boxes = tuple[Box, ...]


def draw_towers(rng: Random) -> Boxes:
    """Three towers of one to four blocks."""
    heights = [rng.randint(1, TALLEST) for _ in range(3)]
    return tuple(tower([rng.choice(COLOURS) for _ in range(height)]) for height in heights)


def tower(colours: list[str]) -> Box:
    """A tower of blocks of these colours, from the base upwards."""
    return tuple(Item(_TOWER_X, _TOWER_Y - _PITCH * k, _BLOCK, "square", colour) for k, colour in enumerate(colours))


def draw_scattered(rng: Random) -> Boxes:
    """Three boxes of one to seven objects that do not overlap."""
    counts = [rng.randint(1, MOST) for _ in range(3)]
    kinds = [[_kind(rng) for _ in range(count)] for count in counts]
    return tuple(scatter(rng, of_box) for of_box in kinds)


Kind = tuple[int, str, str]
"""Size, shape, colour."""


def scatter(rng: Random, kinds: list[Kind], box: Box = ()) -> Box:
    """``box`` and objects of these kinds; one that finds no room after many tries becomes small, or is left out."""
    placed = list(box)
    for size, shape, colour in kinds:
        for attempt in range(60):
            side = size if attempt < 40 else SIZES[0]
            item = Item(_place(rng, side), _place(rng, side), side, shape, colour)
            if all(_apart(item, other) for other in placed):
                placed.append(item)
                break
    return tuple(placed)


def record(boxes: Boxes) -> list[list[dict[str, Any]]]:
    """``structured_rep`` of a row."""
    return [
        [{"y_loc": i.y, "type": i.shape, "color": _HEX[i.colour], "x_loc": i.x, "size": i.size} for i in box]
        for box in boxes
    ]


def is_towers(boxes: Boxes) -> bool:
    """Whether the boxes hold towers."""
    return all(box == tower([item.colour for item in box]) for box in boxes)


def _kind(rng: Random) -> Kind:
    return rng.choice(SIZES), rng.choice(SHAPES), rng.choice(COLOURS)


def _place(rng: Random, size: int) -> int:
    where = rng.random()  # one number for both: drawing is most of the work
    return SIDE - size if where < _AT_EDGE else int((where - _AT_EDGE) / (1 - _AT_EDGE) * (SIDE - size + 1))


def _apart(one: Item, other: Item) -> bool:
    across = max(one.x - other.x - other.size, other.x - one.x - one.size)
    return max(across, one.y - other.y - other.size, other.y - one.y - one.size) >= 1
