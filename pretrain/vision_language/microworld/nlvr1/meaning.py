"""What a statement about three boxes means, and whether it holds.

A number alone (``two black blocks``) means just so many, and what is said of all objects of a sort, or of the box of a
sort, is false where there is none. The writers of NLVR v1 mean it so: of the rows of its development set with sentences
that the templates of this folder make, more than 99 of 100 have the truth that is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from pretrain.vision_language.microworld.nlvr1.scenes import Box, Boxes, Item

How = Literal["exactly", "at least", "at most"]


class Amount(NamedTuple):
    """A number of things."""

    how: How
    number: int

    def holds(self, count: int) -> bool:
        """Whether ``count`` is such a number."""
        if self.how == "exactly":
            return count == self.number
        return count >= self.number if self.how == "at least" else count <= self.number


SOME = Amount("at least", 1)


class Items(NamedTuple):
    """Objects of a sort; what is None, or empty, is not asked for.

    Attributes:
        colours: one of these.
        shape: this one.
        size: in pixels.
        touching: an edge (``edge`` = any) or a ``corner``.
        apart: touching no edge.
        level: of its tower: 0 the base, 1 the second, -1 the top.
    """

    colours: tuple[str, ...] = ()
    shape: str | None = None
    size: int | None = None
    touching: str | None = None
    apart: bool = False
    level: int | None = None

    def of(self, box: Box) -> list[Item]:
        """Those of a box."""
        if self.level is not None:
            box = box[self.level :][:1]
        return [item for item in box if self._fits(item)]

    def _fits(self, item: Item) -> bool:
        return (
            (not self.colours or item.colour in self.colours)
            and self.shape in (None, item.shape)
            and self.size in (None, item.size)
            and (self.touching is None or item.touches(self.touching))
            and not (self.apart and item.touches("edge"))
        )


class Holds(NamedTuple):
    """A box with so many objects of a sort."""

    amount: Amount
    items: Items

    def holds(self, box: Box) -> bool:
        """Whether ``box`` is one."""
        return self.amount.holds(len(self.items.of(box)))


class Palette(NamedTuple):
    """A box of just these colours."""

    colours: tuple[str, ...]

    def holds(self, box: Box) -> bool:
        """Whether ``box`` is one."""
        return {item.colour for item in box} == set(self.colours)


class Colourful(NamedTuple):
    """A box of so many colours."""

    number: int

    def holds(self, box: Box) -> bool:
        """Whether ``box`` is one."""
        return len({item.colour for item in box}) == self.number


class Over(NamedTuple):
    """A tower with a block of one colour right above one of another; ``top``: the upper one is the top."""

    upper: str
    lower: str
    top: bool = False

    def holds(self, box: Box) -> bool:
        """Whether ``box`` is one."""
        pairs = [(upper.colour, lower.colour) for lower, upper in pairwise(box)]
        return (self.upper, self.lower) in (pairs[-1:] if self.top else pairs)


class Stacked(NamedTuple):
    """A tower in which so many blocks of a colour, and no more, stand one upon the other."""

    colour: str
    number: int

    def holds(self, box: Box) -> bool:
        """Whether ``box`` is one."""
        longest = run = 0
        for item in box:
            run = run + 1 if item.colour == self.colour else 0
            longest = max(longest, run)
        return longest == self.number


class Between(NamedTuple):
    """A tower with a block of this colour between two blocks that have one other colour."""

    colour: str

    def holds(self, box: Box) -> bool:
        """Whether ``box`` is one."""
        return any(
            b.colour == self.colour != a.colour == c.colour for a, b, c in zip(box, box[1:], box[2:], strict=False)
        )


BoxTest = Holds | Palette | Colourful | Over | Stacked | Between


def _meets(box: Box, tests: Sequence[BoxTest]) -> bool:
    return all(test.holds(box) for test in tests)


class HowManyBoxes(NamedTuple):
    """So many boxes meet all tests."""

    amount: Amount
    tests: tuple[BoxTest, ...]

    def counted(self, boxes: Boxes) -> int:
        """How many boxes meet them."""
        return sum(_meets(box, self.tests) for box in boxes)

    def holds(self, boxes: Boxes) -> bool:
        """Whether it holds of ``boxes``."""
        return self.amount.holds(self.counted(boxes))


class HowManyItems(NamedTuple):
    """So many objects of a sort in all boxes together."""

    amount: Amount
    items: Items

    def counted(self, boxes: Boxes) -> int:
        """How many objects of the sort there are."""
        return sum(len(self.items.of(box)) for box in boxes)

    def holds(self, boxes: Boxes) -> bool:
        """Whether it holds of ``boxes``."""
        return self.amount.holds(self.counted(boxes))


class Every(NamedTuple):
    """Every object of the first sort is one of the second. There are some of the first."""

    items: Items
    are: Items

    def holds(self, boxes: Boxes) -> bool:
        """Whether it holds of ``boxes``."""
        found = [(item, self.are.of(box)) for box in boxes for item in self.items.of(box)]
        return all(item in among for item, among in found) and bool(found)


class Together(NamedTuple):
    """All objects of a sort, two or more, are in one box."""

    items: Items

    def holds(self, boxes: Boxes) -> bool:
        """Whether it holds of ``boxes``."""
        counts = [len(self.items.of(box)) for box in boxes]
        return sum(map(bool, counts)) == 1 and sum(counts) > 1


class Alike(NamedTuple):
    """So many boxes (the most that agree) have one height, or one colour at the base or the top."""

    what: Literal["height", "base", "top"]
    amount: Amount

    def counted(self, boxes: Boxes) -> int:
        """How many boxes agree, of those that agree with most."""
        values = {"height": lambda box: len(box), "base": lambda box: box[0].colour, "top": lambda box: box[-1].colour}
        found = [values[self.what](box) for box in boxes]
        return max(found.count(value) for value in found)

    def holds(self, boxes: Boxes) -> bool:
        """Whether it holds of ``boxes``."""
        return self.amount.holds(self.counted(boxes))


class The(NamedTuple):
    """There are boxes that meet the tests, and all of them meet the others too."""

    which: tuple[BoxTest, ...]
    tests: tuple[BoxTest, ...]

    def holds(self, boxes: Boxes) -> bool:
        """Whether it holds of ``boxes``."""
        found = [box for box in boxes if _meets(box, self.which)]
        return all(_meets(box, self.tests) for box in found) and bool(found)


class WallColours(NamedTuple):
    """The objects that touch an edge have so many colours."""

    number: int

    def counted(self, boxes: Boxes) -> int:
        """How many colours they have."""
        return len({item.colour for box in boxes for item in box if item.touches("edge")})

    def holds(self, boxes: Boxes) -> bool:
        """Whether it holds of ``boxes``."""
        return self.counted(boxes) == self.number


class AllOf(NamedTuple):
    """Several statements at once."""

    parts: tuple[HowManyBoxes | HowManyItems, ...]

    def holds(self, boxes: Boxes) -> bool:
        """Whether it holds of ``boxes``."""
        return all(part.holds(boxes) for part in self.parts)


Meaning = HowManyBoxes | HowManyItems | Every | Together | Alike | The | WallColours | AllOf


def count_of(meaning: Meaning, boxes: Boxes) -> int | None:
    """How many there are of what a statement counts, whatever it claims; None for one that counts nothing."""
    return meaning.counted(boxes) if isinstance(meaning, HowManyBoxes | HowManyItems | Alike | WallColours) else None
