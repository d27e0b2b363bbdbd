"""Statements about towers of blocks: their heights, and what stands where in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pretrain.vision_language.microworld.nlvr1 import meaning as m
from pretrain.vision_language.microworld.nlvr1 import tower_contents as t
from pretrain.vision_language.microworld.nlvr1.meaning import SOME, Amount, Holds, HowManyBoxes, Items
from pretrain.vision_language.microworld.nlvr1.scenes import TALLEST
from pretrain.vision_language.microworld.nlvr1.tower_words import (
    at_level,
    block_word,
    blocks_of,
    box_word,
    draw_colour,
    draw_height,
    item_word,
    on_top,
    plural_of,
)
from pretrain.vision_language.microworld.nlvr1.wording import Said, Words, draw_amount


def level(w: Words) -> Said:
    """``There are two towers with a blue block at the top``, ``There is a blue block as the base of a tower``."""
    colour, place = draw_colour(w), w.pick("top", "base")
    amount = draw_amount(w.rng, 3)
    said = HowManyBoxes(amount, (at_level(place, colour),))
    where = w.pick("top", "top") if place == "top" else w.pick("base", "base", "bottom")
    block = f"{colour} {block_word(w)}"
    if w.chance(0.4):
        things = w.count(amount, block)
        return f"{w.there(things)} as the {where} of {'a tower' if w.chance(0.9) else 'the towers'}", said
    towers, one = w.there(w.count(amount, "tower")), w.pick("a", "a", w.number(1))
    if amount == SOME and w.chance(0.3):
        return (
            w.pick(
                f"There is a {box_word(w)} with {one} {block} {on_top(w, place)}",
                f"There is a {colour} {item_word(w)} {on_top(w, place)}",
            ),
            said,
        )
    text = w.pick(
        f"{towers} with {one} {block} at {w.pick('the ', 'the ', '')}{where}",
        f"{towers} {w.pick('having', 'that has', 'which has')} a {block} at the {where}",
        f"{towers} with a {colour} {where}",
    )
    return text, said


def height(w: Words) -> Said:
    """``There is a tower with four blocks``, ``There is only one tower with exactly three blocks``."""
    amount, tall = draw_amount(w.rng, 3, some=0.55), draw_height(w)
    said = HowManyBoxes(amount, (Holds(tall, Items()),))
    number = w.number(tall.number)
    if tall.how == "exactly" and amount == SOME and w.chance(0.2):
        return f"There is a {number} block{w.pick('s', '')} tower", said
    noun, block = (box_word(w), item_word(w)) if w.chance(0.25) else ("tower", block_word(w))
    towers = w.there(w.count(amount, noun, plural_of(noun)))
    return f"{towers} {w.pick('with', 'with', 'that has', 'which has')} {blocks_of(w, tall, block)}", said


def height_and_level(w: Words) -> Said:
    """``There is a blue block as the top of a tower with at least two blocks``."""
    amount, tall, colour, place = (
        draw_amount(w.rng, 3, some=0.65),
        draw_height(w),
        draw_colour(w),
        w.pick("top", "base"),
    )
    said = HowManyBoxes(amount, (Holds(tall, Items()), at_level(place, colour)))
    block, blocks = f"{colour} block", blocks_of(w, tall, "block")
    towers = w.there(w.count(amount, "tower"))
    if amount == SOME and w.chance(0.4):
        item = w.pick("one", "item")
        text = f"There is a {box_word(w)} with {blocks_of(w, tall, 'item')} and {w.pick('the', 'a')} {colour} {item} "
        return text + (w.pick("on top", "is on top") if place == "top" else "touching the wall"), said
    text = w.pick(
        f"{w.there(w.count(amount, block))} as the {place} of a tower with {blocks}",
        f"{towers} with {blocks} {w.pick('having', 'with', 'and')} a {block} at the {place}",
    )
    return text, said


def the(w: Words) -> Said:
    """``The tower with four blocks has a black block at the top``, ``The base of a three blocks tower is yellow``."""
    number, colour, place = w.rng.randint(2, TALLEST), draw_colour(w), w.pick("top", "base")
    said = m.The((Holds(Amount("exactly", number), Items()),), (at_level(place, colour),))
    many = w.number(number)
    text = w.pick(
        f"The tower with {many} blocks has a {colour} block at the {place}",
        f"The {place} of {w.pick('the', 'a')} {many} block{w.pick('s', '')} tower is {colour}",
        f"The {many} block{w.pick('s', '')} tower has a {colour} {place}",
    )
    return text, said


def over(w: Words) -> Said:
    """``There is a tower with a blue block over a yellow block``, ``There is no yellow block above a blue block``."""
    upper, lower, top = draw_colour(w), draw_colour(w), w.chance(0.12)
    amount = SOME if top else draw_amount(w.rng, 2, some=0.65)
    said = HowManyBoxes(amount, (m.Over(upper, lower, top),))
    block = block_word(w)
    if top:
        text = f"a tower with a {lower} {block} below a {upper} {block} at the top"
        return w.pick("There is ", "There is ", "There exists ") + text, said
    above = w.pick("over", "above", "on", "on top of", "over", "above")
    if amount.number < 2 and w.chance(0.5):
        return f"{w.there(w.count(amount, f'{upper} {block}'))} {above} a {lower} {block}", said
    towers = w.there(w.count(amount, "tower"))
    return f"{towers} {w.pick('with', 'having', 'which has')} a {upper} {block} {above} a {lower} {block}", said


def wall_and_above(w: Words) -> Said:
    """``There is a box with a black square touching the wall and another one on top of it``."""
    base, second, item = draw_colour(w), draw_colour(w), item_word(w)
    here = w.pick("There is a box with a", "There is a")
    other = (
        w.pick(f"another {second} one", f"a {second} {item}", f"a {second} one") if base != second else "another one"
    )
    joined = w.pick(f"with {other}", f"and {other}")
    text = f"{here} {base} {item} touching the wall {joined} {w.pick('right on top', 'on top')} of it"
    return text, HowManyBoxes(SOME, (at_level("base", base), Holds(SOME, Items((second,), level=1))))


def second(w: Words) -> Said:
    """``There is only one tower where the second block is black``."""
    amount, colour = draw_amount(w.rng, 2), draw_colour(w)
    tail = f"the second block{w.pick(' from the base', '', ' from the bottom')} is {colour}"
    said = HowManyBoxes(amount, (Holds(SOME, Items((colour,), level=1)),))
    return f"{w.there(w.count(amount, 'tower'))} {w.pick('where', 'that', 'in which')} {tail}", said


def alike(w: Words) -> Said:
    """``There are at least two towers with the same height``."""
    whats: tuple[Literal["height", "base", "top"], ...] = ("height", "base", "top")
    (what,) = w.rng.choices(whats, (50, 35, 15))
    if w.chance(0.2):
        words = {
            "height": "are of the same height",
            "base": "have the same base color",
            "top": "have the same top color",
        }
        return f"All {w.number(3)} towers {words[what]}", m.Alike(what, Amount("exactly", 3))
    amount = Amount("at least" if w.chance(0.33) else "exactly", 2)
    words = {"height": "the same height", "base": "the same base color", "top": "the same color at the top"}
    towers = w.there(w.count(amount, "tower"))
    return f"{towers} {w.pick('with', 'which has', 'that have')} {words[what]}", m.Alike(what, amount)


def between(w: Words) -> Said:
    """``There is a box with a black item between 2 items of the same color``."""
    colour, item = draw_colour(w), item_word(w)
    text = f"There is a {w.pick('box', 'tower')} with a {colour} {item} between {w.number(2)} {item}s of the same color"
    return text, HowManyBoxes(SOME, (m.Between(colour),))


def two_heights(w: Words) -> Said:
    """``There are two towers which has three and four blocks each``."""
    one, other = w.rng.sample(range(1, TALLEST + 1), 2)
    parts = [HowManyBoxes(SOME, (Holds(Amount("exactly", number), Items()),)) for number in (one, other)]
    text = f"There are two towers {w.pick('which has', 'with')} {w.number(one)} and {w.number(other)} blocks each"
    return text, m.AllOf(tuple(parts))


def of_the_three(w: Words) -> Said:
    """``Two of the three towers has a blue base``, ``At least two of the towers have yellow bases``."""
    colour, place, number = draw_colour(w), w.pick("top", "base"), w.rng.randint(1, 2)
    amount = Amount("at least" if w.chance(0.35) else "exactly", number)
    how = {"at least": "At least ", "exactly": w.pick("", "", "Only ", "Exactly ")}[amount.how]
    towers = w.pick(f"of the {w.number(3)} towers", "of the towers", "of the three towers")
    has = w.pick("has", "have")
    many = w.number(number) if how else w.number(number).capitalize()
    return f"{how}{many} {towers} {has} a {colour} {place}", HowManyBoxes(amount, (at_level(place, colour),))


TEMPLATES: tuple[tuple[float, Callable[[Words], Said]], ...] = (
    *((0.25, level), (0.1, height), (0.13, height_and_level), (0.03, the), (0.15, over), (0.12, t.contents)),
    *(
        (0.03, t.stacked),
        (0.04, t.palette),
        (0.04, t.colourful),
        (0.04, t.blocks),
        (0.04, t.wall),
        (0.02, wall_and_above),
    ),
    *((0.02, second), (0.03, alike), (0.01, between), (0.01, t.apart)),
    *((0.04, t.coloured_and_tall), (0.03, t.contents_of_a_height), (0.01, two_heights), (0.02, of_the_three)),
)
"""With how often each is used."""
