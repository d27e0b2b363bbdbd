"""Scenes of a few things of known class, colour, size and place, and sentences about them, from seed and number."""

from __future__ import annotations

from random import Random
from typing import Literal, NamedTuple

from capt.pretrain.base.randomness import derive

# Random numbers of one scene or statement.


def random_for(name: str, seed: int, number: int) -> Random:
    """The generator of thing ``number`` of the stream ``name``: it depends on these alone, whatever else is drawn.

    Python's own, which draws one number ten times as fast as NumPy's.
    """
    return Random(derive(seed, "microworld", name, number))


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
    """A thing: its class and colour (places in `CLASSES` and `COLOURS`), its size, and its box in pixels."""

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
    # Anywhere within its cell: no two things overlap.
    left = cell % _COLUMNS * across + rng.randint(0, across - width)
    top = cell // _COLUMNS * down + rng.randint(0, down - height)
    return Thing(kind, colour, large, (left, top, left + width, top + height))


# Descriptions of things (``the small red ball``), what they fit in a scene, and positions of things.


Side = Literal["left", "right", "above", "below"]
SIDES: tuple[Side, ...] = ("left", "right", "above", "below")


class Described(NamedTuple):
    """A description of a thing; None = nothing. Classes and colours are places in `CLASSES` and `COLOURS`."""

    kind: int | None = None
    colour: int | None = None
    large: bool | None = None

    def fits(self, thing: Thing) -> bool:
        """Return whether all of it is true of ``thing``."""
        return (
            self.kind in (None, thing.kind)
            and self.colour in (None, thing.colour)
            and (self.large is None or self.large == thing.large)
        )

    def count(self, scene: Scene) -> int:
        """Return the number of things of the scene that it is true of."""
        return sum(self.fits(thing) for thing in scene)

    def only(self, scene: Scene) -> Thing | None:
        """The one thing that it is true of; None for none and for several."""
        found = [thing for thing in scene if self.fits(thing)]
        return found[0] if len(found) == 1 else None

    def words(self, number: int = 1) -> str:
        """In words, without an article: ``small red ball``, ``red things`` (``number`` other than 1)."""
        size = [] if self.large is None else ["large" if self.large else "small"]
        colour = [] if self.colour is None else [COLOURS[self.colour]]
        noun = "thing" if self.kind is None else CLASSES[self.kind]
        return " ".join([*size, *colour, noun if number == 1 else f"{noun}s"])


def stands(side: Side, one: Thing, other: Thing) -> bool | None:
    """Return whether ``one`` is on this side of ``other``; None where their centres are too close to say."""
    axis = 0 if side in ("left", "right") else 1
    distance = other.centre[axis] - one.centre[axis]
    if abs(distance) < MARGIN:
        return None
    return (distance > 0) == (side in ("left", "above"))


def outermost(side: Side, scene: Scene) -> Thing | None:
    """The thing on this side of all others; None where two are too close to say."""
    found = [thing for thing in scene if all(stands(side, thing, other) for other in scene if other is not thing)]
    return found[0] if found else None


# Captions of a scene, and statements about two scenes that are true of some pairs and false of others.


_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def number_word(number: int) -> str:
    """0 to 8 in words."""
    return _NUMBERS[number]


def captions(scene: Scene, rng: Random, number: int = 5) -> list[str]:
    """``number`` true sentences about a scene: single things, two things and their relation, how many of a kind."""
    return [rng.choice((_one, _two, _counted))(scene, rng) for _ in range(number)]


def _one(scene: Scene, rng: Random) -> str:
    what = _full(rng.choice(scene), rng)
    return f"{rng.choice(('There is a', 'A picture of a'))} {what}."


def _two(scene: Scene, rng: Random) -> str:
    one, other = rng.sample(scene, 2)
    sides = [side for side in SIDES if stands(side, one, other)]
    if not sides:
        return f"There is a {_full(one, rng)} and a {_full(other, rng)}."
    side = rng.choice(sides)
    where = {"left": "to the left of", "right": "to the right of"}.get(side, side)
    return f"There is a {_full(one, rng)} {where} a {_full(other, rng)}."


def _counted(scene: Scene, rng: Random) -> str:
    thing = rng.choice(scene)
    what = rng.choice((Described(thing.kind), Described(None, thing.colour), Described(thing.kind, thing.colour)))
    count = what.count(scene)
    return f"There {'is' if count == 1 else 'are'} {number_word(count)} {what.words(count)}."


def _full(thing: Thing, rng: Random) -> str:
    return Described(thing.kind, thing.colour, thing.large if rng.random() < 0.5 else None).words()


class Statement(NamedTuple):
    """A statement about a left and a right picture: ``The left image contains exactly two red balls.``

    Attributes:
        where: the picture or pictures that it is about; ``total`` adds up both.
        least: the count of the things described must be this or more, in the picture (one of them, both, neither)
            that ``where`` names.
        exactly: the count must be ``least`` and no more.
        what: the things.
    """

    where: Literal["left", "right", "one", "both", "neither", "total"]
    what: Described
    least: int
    exactly: bool

    def true_of(self, left: Scene, right: Scene) -> bool:
        """Return whether the statement is true."""
        counts = self.what.count(left), self.what.count(right)
        if self.where == "total":
            return self._holds(sum(counts))
        held = self._holds(counts[0]), self._holds(counts[1])
        truths = {"left": held[0], "right": held[1], "one": held[0] != held[1], "both": all(held)}
        return truths.get(self.where, not any(held))

    def words(self) -> str:
        """The sentence."""
        things = self.things()
        if self.where == "total":
            return f"There {'is' if self.least == 1 else 'are'} {things} in total."
        subject = {"left": "The left image contains", "right": "The right image contains"}
        others = {"one": "Only one image contains", "both": "Both images contain", "neither": "Neither image contains"}
        return f"{(subject | others)[self.where]} {things}."

    def things(self) -> str:
        """``a red ball``, ``at least two balls``, ``exactly one red thing``."""
        if self.least == 1 and not self.exactly:
            return f"{'at least one' if self.where == 'total' else 'a'} {self.what.words()}"
        how = "exactly" if self.exactly else "at least"
        return f"{how} {number_word(self.least)} {self.what.words(self.least)}"

    def _holds(self, count: int) -> bool:
        return count == self.least if self.exactly else count >= self.least


def draw_statement(rng: Random) -> Statement:
    """A statement of any sort, true or not."""
    kind, colour = rng.randrange(len(CLASSES)), rng.randrange(len(COLOURS))
    (what,) = rng.choices((Described(kind), Described(None, colour), Described(kind, colour)), (5, 2, 3))
    wheres: tuple[Literal["left", "right", "one", "both", "neither", "total"], ...]
    wheres = ("left", "right", "one", "both", "neither", "total")
    where = rng.choice(wheres)
    most = 4 if where == "total" else 3
    if where == "neither" or rng.random() < 0.5:
        return Statement(where, what, 1, exactly=False)
    return Statement(where, what, rng.randrange(1, most), exactly=rng.random() < 0.5)
