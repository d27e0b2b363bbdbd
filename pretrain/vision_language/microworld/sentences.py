"""Captions of a scene, and statements about two scenes that are true of some pairs and false of others."""

from __future__ import annotations

from random import Random
from typing import Literal, NamedTuple

from capt.pretrain.vision_language.microworld.scenes import CLASSES, COLOURS, SIDES, Described, Scene, Thing, stands

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
        """Whether it holds."""
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
    """A statement of any sort; whether it is true of something is not its matter."""
    kind, colour = rng.randrange(len(CLASSES)), rng.randrange(len(COLOURS))
    (what,) = rng.choices((Described(kind), Described(None, colour), Described(kind, colour)), (5, 2, 3))
    wheres: tuple[Literal["left", "right", "one", "both", "neither", "total"], ...]
    wheres = ("left", "right", "one", "both", "neither", "total")
    where = rng.choice(wheres)
    most = 4 if where == "total" else 3
    if where == "neither" or rng.random() < 0.5:
        return Statement(where, what, 1, exactly=False)
    return Statement(where, what, rng.randrange(1, most), exactly=rng.random() < 0.5)
