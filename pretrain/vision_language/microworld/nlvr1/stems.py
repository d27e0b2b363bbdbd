"""Rows of NLVR v1: each statement about four scenes, two of which it is true of.

In a part of the pairs of a true and a false scene both are drawn at random, so that there is something easy to begin
with. In the others a small change makes one of the other: as in the real data, its objects are dealt to the boxes anew,
or else a single object is another, elsewhere, gone or new, and truth cannot be guessed from the words and from what a
scene holds on the whole.

A row says also how many there are of what its statement counts (``count``), which the real data do not have: the answer
to a question, from which a model learns sooner than from true and false.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from pretrain.vision_language.microworld.draws import random_for
from pretrain.vision_language.microworld.nlvr1 import scattered, towers
from pretrain.vision_language.microworld.nlvr1.meaning import Meaning, count_of
from pretrain.vision_language.microworld.nlvr1.scenes import (
    COLOURS,
    MOST,
    SHAPES,
    SIZES,
    TALLEST,
    Box,
    Boxes,
    Kind,
    draw_scattered,
    draw_towers,
    is_towers,
    record,
    scatter,
    tower,
)
from pretrain.vision_language.microworld.nlvr1.wording import Words, hurried

ROWS = 4
"""Rows of a stem."""
_TOWERS = 0.68  # part of the statements that are about towers, as in the real data
_UNLIKE = 0.7  # part of the pairs whose scenes are drawn apart
_DRAWS, _CHANGES = 40, 10


class Stem(NamedTuple):
    """A statement, what it means, and four scenes with its truth: true, true, false, false."""

    sentence: str
    meaning: Meaning
    scenes: tuple[tuple[Boxes, bool], ...]


def draw_stem(seed: int, number: int) -> Stem:
    """Stem ``number``; it depends on seed and number alone."""
    rng = random_for("nlvr1", seed, number)
    for _ in count():
        templates, draw = (
            (towers.TEMPLATES, draw_towers) if rng.random() < _TOWERS else (scattered.TEMPLATES, draw_scattered)
        )
        ((_, template),) = rng.choices(templates, [weight for weight, _ in templates])
        text, meaning = template(Words(rng))
        found = [pair for pair in (_pair(rng, meaning, draw) for _ in range(ROWS // 2)) if pair is not None]
        if len(found) == ROWS // 2:
            scenes = [(_shuffled(rng, true), True) for true, _ in found]
            scenes += [(_shuffled(rng, false), False) for _, false in found]
            return Stem(hurried(text, rng), meaning, tuple(scenes))
    raise AssertionError("a statement that is true and false of some scenes is drawn sooner or later")


def write_rows(path: Path, stems: range, seed: int) -> Iterator[int]:
    """Write the rows of the statements with these numbers; yields them."""
    with path.open("w", encoding="utf-8") as file:
        for number in stems:
            stem = draw_stem(seed, number)
            for k, (boxes, true) in enumerate(stem.scenes):
                file.write(json.dumps(_row(f"{number}-{k}", stem, boxes, true)) + "\n")
            yield number


def _row(identifier: str, stem: Stem, boxes: Boxes, true: bool) -> dict[str, Any]:
    label, number = str(true).lower(), count_of(stem.meaning, boxes)
    return {
        "sentence": stem.sentence,
        "label": label,
        "identifier": identifier,
        "directory": "microworld",
        "evals": {"r0": label},
        **({} if number is None else {"count": number}),
        "structured_rep": record(boxes),
    }


def _pair(rng: Random, meaning: Meaning, draw: Callable[[Random], Boxes]) -> tuple[Boxes, Boxes] | None:
    """A scene of which it is true, and one of which it is not: a scene of its own, or one made of it."""
    return (_unlike(rng, meaning, draw) if rng.random() < _UNLIKE else None) or _alike(rng, meaning, draw)


def _unlike(rng: Random, meaning: Meaning, draw: Callable[[Random], Boxes]) -> tuple[Boxes, Boxes] | None:
    found: dict[bool, Boxes] = {}
    for _ in range(_DRAWS):
        boxes = draw(rng)
        found.setdefault(meaning.holds(boxes), boxes)
        if len(found) == 2:
            return found[True], found[False]
    return None


def _alike(rng: Random, meaning: Meaning, draw: Callable[[Random], Boxes]) -> tuple[Boxes, Boxes] | None:
    for _ in range(_DRAWS):
        boxes = draw(rng)
        held = meaning.holds(boxes)
        for _ in range(_CHANGES):
            changed = _dealt(rng, boxes) if rng.random() < 0.4 else _changed(rng, boxes)
            if meaning.holds(changed) != held:
                return (boxes, changed) if held else (changed, boxes)
    return None


def _dealt(rng: Random, boxes: Boxes) -> Boxes:
    """The same objects, dealt to the boxes anew."""
    items = [item for box in boxes for item in box]
    order = [items[i] for i in rng.sample(range(len(items)), len(items))]
    most = TALLEST if is_towers(boxes) else MOST
    while True:
        cuts = sorted(rng.sample(range(1, len(items)), 2)) if len(items) > 3 else [1, 2]
        parts = order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :]
        if max(map(len, parts)) <= most:
            break
    if is_towers(boxes):
        return tuple(tower([item.colour for item in part]) for part in parts)
    return tuple(scatter(rng, [(item.size, item.shape, item.colour) for item in part]) for part in parts)


def _changed(rng: Random, boxes: Boxes) -> Boxes:
    """One object of one box is another, elsewhere, gone or new."""
    place = rng.randrange(len(boxes))
    box, what = list(boxes[place]), rng.randrange(4)
    chosen = rng.randrange(len(box))
    if is_towers(boxes):
        colours = [item.colour for item in box]
        if what == 0 and len(box) > 1:
            del colours[chosen]
        elif what == 1 and len(box) < TALLEST:
            colours.insert(chosen, rng.choice(COLOURS))
        else:
            colours[chosen] = rng.choice(COLOURS)
        new = tower(colours)
    else:
        item = box.pop(chosen)
        if what == 0 and box:
            new = tuple(box)
        elif what == 1:
            new = _with_one(rng, tuple(box), (item.size, item.shape, item.colour), boxes[place])
        elif what == 2:
            new = (*box, item._replace(colour=rng.choice(COLOURS), shape=rng.choice(SHAPES)))
        else:
            kind = rng.choice(SIZES), rng.choice(SHAPES), rng.choice(COLOURS)
            new = _with_one(rng, (*box, item), kind, boxes[place])
    return tuple(new if i == place else other for i, other in enumerate(boxes))


def _with_one(rng: Random, box: Box, kind: Kind, before: Box) -> Box:
    """The box with one more object of this kind where there is room; as before where there is none."""
    return scatter(rng, [kind], box) if len(box) < MOST else before


def _shuffled(rng: Random, boxes: Boxes) -> Boxes:
    return tuple(boxes[i] for i in rng.sample(range(len(boxes)), len(boxes)))
