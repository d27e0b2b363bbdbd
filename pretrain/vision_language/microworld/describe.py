"""Descriptions of things (``the small red ball``), what they fit in a scene, and positions of things."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pretrain.vision_language.microworld.scenes import CLASSES, COLOURS, MARGIN, Scene, Thing

Side = Literal["left", "right", "above", "below"]
SIDES: tuple[Side, ...] = ("left", "right", "above", "below")


class Described(NamedTuple):
    """What is said of a thing; None = nothing. Classes and colours are places in `CLASSES` and `COLOURS`."""

    kind: int | None = None
    colour: int | None = None
    large: bool | None = None

    def fits(self, thing: Thing) -> bool:
        """Whether all of it is true of ``thing``."""
        return (
            self.kind in (None, thing.kind)
            and self.colour in (None, thing.colour)
            and (self.large is None or self.large == thing.large)
        )

    def count(self, scene: Scene) -> int:
        """How many things of the scene it is true of."""
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
    """Whether ``one`` is on this side of ``other``; None where their centres are too close to say."""
    axis = 0 if side in ("left", "right") else 1
    distance = other.centre[axis] - one.centre[axis]
    if abs(distance) < MARGIN:
        return None
    return (distance > 0) == (side in ("left", "above"))


def outermost(side: Side, scene: Scene) -> Thing | None:
    """The thing on this side of all others; None where two are too close to say."""
    found = [thing for thing in scene if all(stands(side, thing, other) for other in scene if other is not thing)]
    return found[0] if found else None
