"""Statements about boxes of scattered objects."""

from __future__ import annotations

from collections.abc import Callable

from pretrain.vision_language.microworld.nlvr1 import meaning as m
from pretrain.vision_language.microworld.nlvr1.meaning import SOME, Amount, Holds, HowManyBoxes, HowManyItems, Items
from pretrain.vision_language.microworld.nlvr1.scenes import COLOURS, MOST, SHAPES
from pretrain.vision_language.microworld.nlvr1.wording import Said, Words, draw_amount, listed

_EDGE = ("touching the edge", "touching an edge", "touching the wall", "touching the side", "touching any edge")
_PLACES = {
    "edge": _EDGE,
    "bottom": ("touching the base", "closely touching the bottom of a box", "touching the bottom"),
    "right": ("closely touching right wall of a box", "touching the right wall", "touching right side"),
    "left": ("closely touching left wall of a box", "touching the left wall"),
    "top": ("closely touching the top of a box", "touching the top wall"),
    "corner": (
        "touching a corner",
        "closely touching a corner",
        "touching the corner",
        "closely touching a box corner",
    ),
    "apart": ("not touching any edge", "not touching any edge", "not touching the edge", "not touching the wall"),
}


def how_many(w: Words) -> Said:
    """``There are two black triangles not touching any edge``, ``There are 3 yellow squares``."""
    sort, noun = (Items(), w.pick("item", "object")) if w.chance(0.04) else _sort(w)
    amount = draw_amount(w.rng, 4 if sort.colours and sort.shape else 6, some=0.25)
    if w.chance(0.7):
        place = _place(w)
        return f"{w.there(w.count(amount, noun))} {w.pick(*_PLACES[place])}", HowManyItems(amount, _at(sort, place))
    return w.there(w.count(amount, noun)), HowManyItems(amount, sort)


def boxes(w: Words) -> Said:
    """``There are two grey boxes with at least two black objects touching the edge``."""
    (sort, noun), amount, few = _sort(w), draw_amount(w.rng, 3), draw_amount(w.rng, 3)
    place = _place(w) if w.chance(0.35) else ""
    things = f"{w.count(few, noun).text} {w.pick(*_PLACES[place])}" if place else w.count(few, noun).text
    tests = (Holds(few, _at(sort, place) if place else sort),)
    if w.chance(0.3):
        text = w.pick(
            *(f"Each {_box(w)} {w.pick('has', 'contains')} {things}", f"There is {things} in each box"),
            *(f"All boxes contain {things}", f"Every {_box(w)} has {things}"),
        )
        return text, HowManyBoxes(Amount("exactly", 3), tests)
    if w.chance(0.08):
        return f"{w.pick('One', 'Only one')} box has {things}", HowManyBoxes(Amount("exactly", 1), tests)
    box = _box(w)
    counted = w.there(w.count(amount, box, f"{box}es" if box.endswith("x") else f"{box}s"))
    return f"{counted} {w.pick('with', 'with', 'that has', 'containing')} {things}", HowManyBoxes(amount, tests)


def exactly_of_a_box(w: Words) -> Said:
    """``One of the grey squares has exactly four objects``, ``... exactly three objects one of which is a circle``."""
    number = w.rng.randint(1, MOST)
    amount = Amount(w.pick("exactly", "exactly", "exactly", "at least"), number)  # type: ignore[arg-type]
    box = w.pick("grey square", "grey squares", "grey box", "grey boxes", "boxes")
    text = f"One of the {box} {w.pick('has', 'contains')} {w.count(amount, w.pick('object', 'object', 'item')).text}"
    tests = [Holds(amount, Items())]
    if w.chance(0.3) and number > 1:
        sort, noun = _sort(w, coloured_shape=0.3)
        tests.append(Holds(SOME, sort))
        text += f" {w.pick('one of which is', 'and one of them is')} a {noun}"
    return text, HowManyBoxes(SOME, tuple(tests))


def palette(w: Words) -> Said:
    """``There is a box with items of only black and blue color``."""
    amount, number = draw_amount(w.rng, 3, some=0.6), 1 + w.chance(0.55)
    colours = tuple(w.rng.sample(COLOURS, number))
    words = w.colours(colours)
    boxes = w.there(w.count(amount, "box", "boxes"))
    if w.chance(0.2):
        count = w.rng.randint(2, 4)
        tests = (m.Palette(colours), Holds(Amount("exactly", count), Items()))
        return f"{boxes} with only {w.number(count)} {words} items", HowManyBoxes(amount, tests)
    text = w.pick(
        f"{boxes} with only {words} {w.pick('items', 'items', 'objects')}",
        f"{boxes} with items of only {words} {w.pick('color', 'colour')}",
    )
    return text, HowManyBoxes(amount, (m.Palette(colours),))


def colourful(w: Words) -> Said:
    """``There is a box with items of 2 different colors and a black square``."""
    number, tests = w.rng.randint(1, 3), []
    amount = draw_amount(w.rng, 2, some=0.8)
    boxes = w.there(w.count(amount, "box", "boxes"))
    if number == 3 and w.chance(0.5):
        count = w.rng.randint(3, 6)
        tests.append(Holds(Amount("exactly", count), Items()))
        text = f"{boxes} with exactly {w.number(count)} items of all {w.number(3)} different colors"
    else:
        colours = {1: w.pick("only one color", "the same color"), 2: f"{w.number(2)} different colors"}
        text = (
            f"{boxes} with {w.pick('items', 'objects')} of {colours.get(number, f'all {w.number(3)} different colors')}"
        )
    if w.chance(0.3):
        sort, noun = _sort(w)
        return f"{text} and a {noun}", HowManyBoxes(amount, (m.Colourful(number), *tests, Holds(SOME, sort)))
    return text, HowManyBoxes(amount, (m.Colourful(number), *tests))


def several(w: Words) -> Said:
    """``There is a box with a yellow triangle and no blue squares``."""
    number = 3 if w.chance(0.2) else 2
    sorts = [_sort(w, coloured_shape=0.6) for _ in range(number)]
    if len({sort for sort, _ in sorts}) < number:
        sorts = [(Items((c,)), f"{c} {w.pick('item', 'object')}") for c in w.rng.sample(COLOURS, number)]
    fews = [SOME, *(draw_amount(w.rng, 3, some=0.45) for _ in sorts[1:])]
    if w.chance(0.3):
        fews[0] = draw_amount(w.rng, 2, some=0.0)
    phrases = [w.count(few, noun).text for few, (_, noun) in zip(fews, sorts, strict=True)]
    tests = tuple(Holds(few, sort) for few, (sort, _) in zip(fews, sorts, strict=True))
    return f"There is a {_box(w)} with {listed(phrases)}", HowManyBoxes(SOME, tests)


def every(w: Words) -> Said:
    """``Blue squares are not touching any edge``, ``None of the black triangles are touching an edge``."""
    sort, noun = _sort(w, coloured_shape=0.8)
    if w.chance(0.5):
        text = w.pick(
            *(f"None of the {noun}s are {w.pick(*_EDGE)}", f"{noun.capitalize()}s are not {w.pick(*_EDGE)}"),
            *(f"The {noun}s are not touching any edge", f"All {noun}s are not touching the edge"),
        )
        return text, m.Every(sort, Items(apart=True))
    place = w.pick("edge", "edge", "edge", "bottom")
    touching = w.pick(*_PLACES[place])
    text = w.pick(
        f"{noun.capitalize()}s are {touching}", f"All {noun}s are {touching}", f"All the {noun}s are {touching}"
    )
    return text, m.Every(sort, Items(touching=place))


def together(w: Words) -> Said:
    """``All blue items are in the same box``."""
    sort, noun = _sort(w, coloured_shape=0.5)
    text = w.pick(
        f"All {noun}s are in the same box", f"All the {noun}s are in one box", f"There are {noun}s in only one box"
    )
    if text.startswith("There"):
        return text, HowManyBoxes(Amount("exactly", 1), (Holds(SOME, sort),))
    return text, m.Together(sort)


def some_of_a_box(w: Words) -> Said:
    """``There is a box that has four items and three are touching the side``."""
    number = w.rng.randint(2, 6)
    part = w.rng.randrange(1, number)
    few, are = Amount("exactly", part), "is" if part == 1 else "are"
    text = f"There is a box {w.pick('with', 'that has')} {w.number(number)} {w.pick('items', 'objects')}"
    joined = w.pick("and the", "and", "and only")
    if w.chance(0.4):
        test = Holds(few, Items(touching="edge"))
        text += f" {joined} {w.number(part)} {are} {w.pick(*_EDGE)}"
    else:
        colour = w.pick(*COLOURS)
        test = Holds(few, Items((colour,)))
        text += f" {joined} {w.number(part)} {are} {colour}"
    return text, HowManyBoxes(SOME, (Holds(Amount("exactly", number), Items()), test))


def either(w: Words) -> Said:
    """``There is a black or yellow triangle touching the base``, ``There is a square ... that is not yellow``."""
    shape, place = w.pick(*SHAPES), _place(w)
    pair = tuple(w.rng.sample(COLOURS, 2))
    (other,) = set(COLOURS) - set(pair)
    where = w.pick(*_PLACES[place])
    text = w.pick(
        f"There is a {pair[0]} or {pair[1]} {shape} {where}", f"There is a {shape} {where} that is not {other}"
    )
    return text, HowManyItems(SOME, _at(Items(pair, shape), place))


def sized(w: Words) -> Said:
    """``There is a small blue square touching the wall``; objects have 10, 20 or 30 pixels."""
    word, size = (("small", 10), ("medium", 20), ("big", 30), ("large", 30))[w.rng.randrange(4)]
    sort, noun = _sort(w, coloured_shape=0.6)
    sort, amount = sort._replace(size=size), draw_amount(w.rng, 2, some=0.6)
    things = w.there(w.count(amount, f"{word} {noun}"))
    if w.chance(0.5):
        return things, HowManyItems(amount, sort)
    place = _place(w)
    return f"{things} {w.pick(*_PLACES[place])}", HowManyItems(amount, _at(sort, place))


TEMPLATES: tuple[tuple[float, Callable[[Words], Said]], ...] = (
    *((0.37, how_many), (0.15, boxes), (0.1, exactly_of_a_box), (0.06, palette), (0.05, colourful), (0.09, several)),
    *((0.07, every), (0.02, together), (0.03, some_of_a_box), (0.03, either), (0.03, sized)),
)
"""With how often each is used."""


def _sort(w: Words, coloured_shape: float = 0.55) -> tuple[Items, str]:
    """Objects of a colour, a shape or both, and their name in the singular."""
    colour, shape, noun = w.pick(*COLOURS), w.pick(*SHAPES), w.pick("item", "object", "item")
    if w.chance(coloured_shape):
        return Items((colour,), shape), f"{colour} {shape}"
    if w.chance(0.6):
        return Items((colour,)), f"{colour} {noun}"
    return Items((), shape), shape


def _place(w: Words) -> str:
    return w.rng.choices(list(_PLACES), [30, 17, 8, 2, 2, 9, 32])[0]


def _at(sort: Items, place: str) -> Items:
    return sort._replace(apart=True) if place == "apart" else sort._replace(touching=place)


def _box(w: Words) -> str:
    return w.pick("box", "box", "grey box", "grey square")
