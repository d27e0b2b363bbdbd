"""Meaning of a sentence of the microworld, read off its words alone and tried on what the files say of a picture."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np

CLASSES = ["ball", "book", "car", "cat", "chair", "cup", "dog", "hat", "lamp", "tree"]
COLOURS = ["black", "blue", "green", "red", "white", "yellow"]
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"]


class Seen(NamedTuple):
    """A region as its file has it."""

    kind: str
    colour: str
    size: str
    x: float
    y: float


Picture = list[Seen]


def read_tsv(path: Path) -> Iterator[tuple[str, Picture]]:
    """Names and regions of a feature file, decoded by hand."""
    for line in path.read_text().splitlines():
        name, _, _, objects, _, attributes, _, number, boxes, _ = line.split("\t")
        kinds = np.frombuffer(base64.b64decode(objects), "<i8")
        colours = np.frombuffer(base64.b64decode(attributes), "<i8")
        edges = np.frombuffer(base64.b64decode(boxes), "<f4").reshape(int(number), 4)
        yield (
            name,
            [
                Seen(CLASSES[k], COLOURS[c], "large" if x2 - x1 > 84 else "small", (x1 + x2) / 2, (y1 + y2) / 2)
                for k, c, (x1, y1, x2, y2) in zip(kinds, colours, edges, strict=True)
            ],
        )


def fitting(words: str, picture: Picture) -> Picture:
    """Things like ``small red balls``."""
    found = picture
    for word in words.split():
        name = word if word in ("thing", *CLASSES, *COLOURS, "small", "large") else word.removesuffix("s")
        assert name in ("thing", *CLASSES, *COLOURS, "small", "large"), word
        found = [one for one in found if name in ("thing", one.kind, one.colour, one.size)]
    return found


def the(words: str, picture: Picture) -> Seen:
    """The one thing that the words can mean."""
    (one,) = fitting(words, picture)
    return one


SIDES: dict[str, Callable[[Seen, Seen], bool]] = {
    "to the left of": lambda one, other: one.x < other.x,
    "to the right of": lambda one, other: one.x > other.x,
    "above": lambda one, other: one.y < other.y,
    "below": lambda one, other: one.y > other.y,
}
_SIDE = "|".join(SIDES)
_MOST = {"leftmost": "to the left of", "rightmost": "to the right of", "topmost": "above", "lowest": "below"}


def clear(picture: Picture, side: str, one: Seen) -> bool:
    """Return whether every other thing is well on one side of ``one``."""
    axis = 3 if "to the" in side else 4
    return all(abs(other[axis] - one[axis]) >= 24 for other in picture if other is not one)


def answer(question: str, picture: Picture) -> str:
    """The answer to a question, by trying every thing of the picture; fails where there is not just one."""

    def yes(truth: bool) -> str:
        return "yes" if truth else "no"

    q = question
    if m := re.fullmatch(r"Is there a (\w+) and a (\w+)\?", q):
        return yes(bool(fitting(m[1], picture)) and bool(fitting(m[2], picture)))
    if m := re.fullmatch(r"Is there a (.+)\?", q):
        return yes(bool(fitting(m[1], picture)))
    if m := re.fullmatch(rf"Is the (.+) ({_SIDE}) the (.+)\?", q):
        return yes(SIDES[m[2]](the(m[1], picture), the(m[3], picture)))
    if m := re.fullmatch(r"Is the (.+) (\w+)\?", q):
        return yes(the(m[1], picture).colour == m[2])
    if m := re.fullmatch(r"How many (.+) are there\?", q):
        return str(len(fitting(m[1], picture)))
    if m := re.fullmatch(r"Are there more (.+) than (.+)\?", q):
        first, second = len(fitting(m[1], picture)), len(fitting(m[2], picture))
        assert first != second
        return yes(first > second)
    if m := re.fullmatch(r"What (is|color is) the (leftmost|rightmost|topmost|lowest) thing\?", q):
        side = _MOST[m[2]]
        (one,) = [o for o in picture if all(SIDES[side](o, other) for other in picture if other is not o)]
        assert clear(picture, side, one)
        return one.kind if m[1] == "is" else one.colour
    if m := re.fullmatch(r"What color is the (.+)\?", q):
        return the(m[1], picture).colour
    if m := re.fullmatch(rf"What is ({_SIDE}) the (.+)\?", q):
        here = the(m[2], picture)
        assert clear(picture, m[1], here)
        (one,) = [other for other in picture if SIDES[m[1]](other, here)]
        return one.kind
    m = re.fullmatch(r"What is the (.+)\?", q)
    assert m, question
    return the(m[1], picture).kind


def caption_holds(caption: str, picture: Picture) -> bool:
    """Return whether a caption is true."""
    if m := re.fullmatch(rf"There is a (.+) ({_SIDE}|and) a (.+)\.", caption):
        first, second = fitting(m[1], picture), fitting(m[3], picture)
        return any(
            m[2] == "and" or SIDES[m[2]](one, other)
            for one, other in permutations(picture, 2)
            if one in first and other in second
        )
    if m := re.fullmatch(r"(?:There is|A picture of) a (.+)\.", caption):
        return bool(fitting(m[1], picture))
    m = re.fullmatch(r"There (?:is|are) (\w+) (.+)\.", caption)
    assert m, caption
    return len(fitting(m[2], picture)) == NUMBERS.index(m[1])


def statement_holds(sentence: str, left: Picture, right: Picture) -> bool:
    """Return whether a statement about two pictures is true."""
    if m := re.fullmatch(r"There (?:is|are) (.+) in total\.", sentence):
        return _amount(m[1], [*left, *right])
    m = re.fullmatch(r"(.+) images? contains? (.+)\.", sentence)
    assert m, sentence
    a, b = _amount(m[2], left), _amount(m[2], right)
    truths = {"The left": a, "The right": b, "Only one": a + b == 1, "Both": a and b, "Neither": not a and not b}
    return truths[m[1]]


def _amount(words: str, picture: Picture) -> bool:
    if m := re.fullmatch(r"(exactly|at least) (\w+) (.+)", words):
        count, number = len(fitting(m[3], picture)), NUMBERS.index(m[2])
        return count == number if m[1] == "exactly" else count >= number
    return len(fitting(words.removeprefix("a "), picture)) >= 1
