"""Statements about the colours of towers of blocks, and how many blocks they hold."""

from __future__ import annotations

from pretrain.vision_language.microworld.nlvr1 import meaning as m
from pretrain.vision_language.microworld.nlvr1.meaning import SOME, Amount, Holds, HowManyBoxes, Items
from pretrain.vision_language.microworld.nlvr1.scenes import COLOURS, TALLEST
from pretrain.vision_language.microworld.nlvr1.tower_words import (
    block_word,
    blocks_of,
    box_word,
    draw_colour,
    draw_few,
    draw_height,
    item_word,
    plural_of,
)
from pretrain.vision_language.microworld.nlvr1.wording import Said, Words, draw_amount, listed


def contents(w: Words) -> Said:
    """``There are two towers that have two blue blocks``, ``There is a tower with a black block and a blue block``."""
    amount = draw_amount(w.rng, 3, some=0.5)
    sorts = w.rng.sample(COLOURS, w.rng.choices((1, 2, 3), (65, 27, 8))[0])
    parts = [(colour, draw_few(w, len(sorts))) for colour in sorts]
    noun, block = (box_word(w), w.pick("item", "square")) if w.chance(0.2) else ("tower", "block")
    said = HowManyBoxes(amount, tuple(Holds(few, Items((colour,))) for colour, few in parts))
    phrases = [w.count(few, f"{colour} {block}").text for colour, few in parts]
    parts_said = listed(phrases)
    if len(parts) == 1 and amount == SOME and w.chance(0.25):
        each = HowManyBoxes(Amount("exactly", 3), said.tests)
        return w.pick(f"All {w.number(3)} towers have {parts_said}", f"All towers contain {parts_said}"), each
    towers = w.there(w.count(amount, noun, plural_of(noun)))
    return f"{towers} {w.pick('with', 'with', 'that has', 'that contains', 'which has')} {parts_said}", said


def contents_of_a_height(w: Words) -> Said:
    """``There is a three blocks tower which has only one blue block``."""
    number, colour = w.rng.randint(2, TALLEST), draw_colour(w)
    tests: list[m.BoxTest] = [Holds(Amount("exactly", number), Items())]
    tower = w.pick(
        f"There is a {w.number(number)} block{w.pick('s', '')} tower which has",
        f"There is a tower with exactly {w.number(number)} blocks, and it has",
    )
    if w.chance(0.2):
        return f"{tower} only one color", HowManyBoxes(SOME, (*tests, m.Colourful(1)))
    few = draw_amount(w.rng, number - 1, some=0.3)
    tests.append(Holds(few, Items((colour,))))
    parts = [w.count(few, f"{colour} block").text]
    if w.chance(0.4):
        other = w.pick(*(c for c in COLOURS if c != colour))
        tests.append(Holds(SOME, Items((other,))))
        parts.append(f"a {other} block")
    return f"{tower} {listed(parts)}", HowManyBoxes(SOME, tuple(tests))


def stacked(w: Words) -> Said:
    """``There is 1 tower with 2 black blocks stacked together``."""
    amount, colour, number = draw_amount(w.rng, 2), draw_colour(w), w.rng.randint(2, 3)
    blocks = w.count(Amount("exactly", number), f"{colour} block").text
    text = f"{w.there(w.count(amount, 'tower'))} with {blocks} {w.pick('stacked together', 'on top of each other')}"
    return text, HowManyBoxes(amount, (m.Stacked(colour, number),))


def palette(w: Words) -> Said:
    """``There is 1 tower with only blue and black blocks``, ``There is a black tower``."""
    amount, number = draw_amount(w.rng, 3, some=0.5), 1 + w.chance(0.6)
    colours = tuple(w.rng.sample(COLOURS, number))
    said = HowManyBoxes(amount, (m.Palette(colours),))
    if number == 1 and w.chance(0.5):
        return w.there(w.count(amount, f"{colours[0]} tower")), said
    towers, words = w.there(w.count(amount, "tower")), w.colours(colours)
    boxes = w.there(w.count(amount, "box", "boxes"))
    text = w.pick(
        f"{towers} with only {words} blocks", f"{boxes} with items of only {words} {w.pick('color', 'colour')}"
    )
    return text, said


def colourful(w: Words) -> Said:
    """``There is a tower that has only one color``, ``There is a box with 3 items of all 3 different colors``."""
    number, amount = w.rng.randint(1, 3), draw_amount(w.rng, 2, some=0.7)
    tests: tuple[m.BoxTest, ...] = (m.Colourful(number),)
    noun = w.pick("tower", "box")
    towers = w.there(w.count(amount, noun, plural_of(noun)))
    if number == 3:
        text = w.pick(
            f"{towers} with blocks of all {w.number(3)} {w.pick('colors', 'colours')}", f"{towers} with all 3 colors"
        )
        return text, HowManyBoxes(amount, tests)
    if number == 1:
        if w.chance(0.4):
            tall = Amount("at least", 2)
            text = f"{towers} with more than one block where all the blocks are of {w.pick('the ', '')}same color"
            return text, HowManyBoxes(amount, (*tests, Holds(tall, Items())))
        return f"{towers} that has only one color", HowManyBoxes(amount, tests)
    return f"{towers} with {w.pick('blocks', 'items')} of {w.number(2)} different colors", HowManyBoxes(amount, tests)


def coloured_and_tall(w: Words) -> Said:
    """``There is a black tower with only one block``, ``There is a box with 3 items of black and yellow color``."""
    tall, number = draw_height(w), 1 + w.chance(0.55)
    colours = tuple(w.rng.sample(COLOURS, number))
    said = HowManyBoxes(SOME, (m.Palette(colours), Holds(tall, Items())))
    if number == 1:
        one = f"There is a tower with only one {block_word(w)} which is {colours[0]}"
        if tall == Amount("exactly", 1) and w.chance(0.6):
            return one, said
        return f"There is a {colours[0]} tower with {blocks_of(w, tall, 'block')}", said
    blocks, item = w.colours(colours), w.pick("item", "block")
    only, color = w.pick("", "only "), w.pick("color", "colour")
    text = w.pick(
        f"There is a {box_word(w)} with {blocks_of(w, tall, item)} of {only}{blocks} {color}",
        f"There is a tower with {blocks_of(w, tall, 'block')} and only {blocks} blocks",
    )
    return text, said


def blocks(w: Words) -> Said:
    """``There are 2 blue blocks``: of all towers together."""
    colour, amount = draw_colour(w), draw_amount(w.rng, 6, some=0.05)
    return w.there(w.count(amount, f"{colour} {w.pick('block', 'block', 'square')}")), m.HowManyItems(
        amount, Items((colour,))
    )


def wall(w: Words) -> Said:
    """``There are two yellow items touching the wall``, ``There is only one color touching the wall``."""
    if w.chance(0.3):
        number = w.rng.randint(1, 3)
        one = w.pick("There is only one color touching the wall", "Only one color is touching the wall")
        words = {1: one, 2: f"Only {w.number(2)} colors are touching the wall"}
        text = words.get(number, f"All {w.number(3)} different colors are touching the wall")
        return text, m.WallColours(number)
    if w.chance(0.25):
        first, second = w.rng.sample(COLOURS, 2)
        amounts = Amount("exactly", 2), Amount("exactly", 1)
        text = f"Only {w.number(2)} {first} and {w.number(1)} {second} item{w.pick('', 's')} are touching the wall"
        parts = [m.HowManyItems(a, Items((c,), touching="edge")) for a, c in zip(amounts, (first, second), strict=True)]
        return text, m.AllOf(tuple(parts))
    colour, amount = draw_colour(w), draw_amount(w.rng, 3)
    items = w.count(amount, f"{colour} {item_word(w)}")
    return f"{w.there(items)} touching the {w.pick('wall', 'wall', 'base')}", m.HowManyItems(
        amount, Items((colour,), touching="edge")
    )


def apart(w: Words) -> Said:
    """``There is a box with 2 yellow squares not touching the wall``."""
    colour, few, item = draw_colour(w), Amount("exactly", w.rng.randint(1, 3)), item_word(w)
    text = f"There is a box with {w.count(few, f'{colour} {item}').text} not touching the wall"
    return text, HowManyBoxes(SOME, (Holds(few, Items((colour,), apart=True)),))
