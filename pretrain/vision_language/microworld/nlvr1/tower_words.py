"""Words of statements about towers."""

from __future__ import annotations

from pretrain.vision_language.microworld.nlvr1.meaning import SOME, Amount, Holds, Items
from pretrain.vision_language.microworld.nlvr1.scenes import COLOURS, TALLEST
from pretrain.vision_language.microworld.nlvr1.wording import Words, draw_amount


def draw_height(w: Words) -> Amount:
    """A height: mostly so many blocks and no more."""
    if w.chance(0.25):
        return Amount("at least", w.rng.randint(2, 3))
    number = w.rng.randint(1, TALLEST)
    return Amount("exactly", number)


def draw_few(w: Words, sorts: int) -> Amount:
    """How many blocks of a colour, where a sentence names so many sorts of them."""
    return draw_amount(w.rng, 2 if sorts > 1 else 3, some=0.45)


def at_level(place: str, colour: str) -> Holds:
    """A block of this colour at the top or the base of a tower."""
    return Holds(SOME, Items((colour,), level=-1 if place == "top" else 0))


def blocks_of(w: Words, tall: Amount, block: str) -> str:
    """``exactly two blocks``, ``more than one block``."""
    if tall.how == "at least" and w.chance(0.4):
        number = tall.number - 1
        return f"more than {w.number(number)} {block}{'' if number == 1 else 's'}"
    return w.count(tall, block).text


def on_top(w: Words, place: str) -> str:
    """Where the block at this place stands."""
    return w.pick("on top", "on top of a tower") if place == "top" else w.pick("touching the wall", "at the bottom")


def draw_colour(w: Words) -> str:
    """One of the three colours."""
    return w.pick(*COLOURS)


def block_word(w: Words) -> str:
    """What a block is called."""
    return w.pick("block", "block", "block", "block", "object", "square")


def item_word(w: Words) -> str:
    """What an object is called where a tower is a box."""
    return w.pick("item", "square", "block")


def box_word(w: Words) -> str:
    """What a box is called."""
    return w.pick("box", "box", "grey box")


def plural_of(noun: str) -> str:
    """The plural of ``tower`` or ``box``."""
    return f"{noun}es" if noun.endswith("x") else f"{noun}s"
