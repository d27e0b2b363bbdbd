"""Questions about a scene, each with the one answer that is right. What a scene leaves open is not asked about it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Literal, NamedTuple

from capt.pretrain.vision_language.microworld.scenes import (
    CLASSES,
    COLOURS,
    MOST,
    SIDES,
    Described,
    Scene,
    Side,
    Thing,
    outermost,
    stands,
)

ANSWERS = ("no", "yes", *map(str, range(MOST + 1)), *COLOURS, *CLASSES)
"""Every answer there is."""

_EASY = 0.6  # part of the wrong descriptions that need no look at a single thing

Form = Literal["colour", "colour is", "count", "exist", "name", "outermost", "beside", "side", "both", "more"]


class Question(NamedTuple):
    """A question.

    Attributes:
        text: as it is asked.
        answer: the right one, out of `ANSWERS`.
        form: what is asked for.
        type: ``question_type`` of VQA: how the text begins.
        entailed: questions whose answers follow from this one's.
    """

    text: str
    answer: str
    form: Form
    type: str
    entailed: tuple[Question, ...] = ()

    @property
    def kind(self) -> str:
        """``answer_type`` of VQA."""
        return kind_of(self.answer)


def kind_of(answer: str) -> str:
    """``answer_type`` of VQA for an answer."""
    if answer in ("yes", "no"):
        return "yes/no"
    return "number" if answer.isdigit() else "other"


def ask(scene: Scene, rng: Random, number: int) -> list[Question]:
    """``number`` different questions about a scene, fewer where it does not hold as much; simple ones come more often.

    A question that is answered with yes or no has either answer with equal probability, as far as the scene allows.
    """
    questions: dict[str, Question] = {}
    # More than are asked for: some do not fit the scene, others give a question again.
    for form in rng.choices(list(FORMS), list(FORMS.values()), k=6 * number):
        question = form(scene, rng)
        if question is not None:
            questions.setdefault(question.text, question)
        if len(questions) == number:
            break
    return list(questions.values())


def exist(scene: Scene, rng: Random) -> Question | None:
    """Ask ``Is there a ball?``, ``Is there a red ball?``; some wrong ones have class and colour of other things."""
    yes, alone = rng.random() < 0.5, rng.random() < 0.5
    if yes:
        thing = _pick(scene, rng)
        return exists(Described(thing.kind) if alone else _coloured(thing), "yes")
    kinds, colours = (set(column) for column in _kinds_and_colours(scene))
    if alone:
        return exists(Described(rng.choice([kind for kind in range(len(CLASSES)) if kind not in kinds])), "no")
    present = {(thing.kind, thing.colour) for thing in scene}
    absent = [(k, c) for k in sorted(kinds) for c in sorted(colours) if (k, c) not in present]
    if not absent or rng.random() < _EASY:
        absent = [(k, c) for k in range(len(CLASSES)) for c in range(len(COLOURS)) if (k, c) not in present]
    return exists(Described(*rng.choice(absent)), "no")


def exists(what: Described, answer: str) -> Question:
    """Return whether there is such a thing. A thing of a colour entails the thing."""
    entailed = (exists(Described(what.kind), "yes"),) if answer == "yes" and what.colour is not None else ()
    return Question(f"Is there a {what.words()}?", answer, "exist", "is there a", entailed)


def colour(scene: Scene, rng: Random) -> Question | None:
    """Ask ``What color is the cup?`` or ``the small cup?`` of a cup that the words tell from all others."""
    found = _unique(scene, rng)
    if found is None:
        return None
    what, thing = found
    entailed = (_is_coloured(what, thing.colour, "yes"), exists(Described(thing.kind, thing.colour), "yes"))
    return Question(
        f"What color is the {what.words()}?", COLOURS[thing.colour], "colour", "what color is the", entailed
    )


def is_coloured(scene: Scene, rng: Random) -> Question | None:
    """Ask ``Is the cup red?``: where not, something else often is."""
    found = _unique(scene, rng)
    if found is None:
        return None
    what, thing = found
    if rng.random() < 0.5:
        return _is_coloured(what, thing.colour, "yes")
    others = sorted({other.colour for other in scene} - {thing.colour})
    if not others or rng.random() < _EASY:
        others = [c for c in range(len(COLOURS)) if c != thing.colour]
    return _is_coloured(what, rng.choice(others), "no")


def _is_coloured(what: Described, hue: int, answer: str) -> Question:
    entailed = (exists(Described(what.kind), "yes"),)
    return Question(f"Is the {what.words()} {COLOURS[hue]}?", answer, "colour is", "is the", entailed)


def count(scene: Scene, rng: Random) -> Question | None:
    """Ask ``How many red balls are there?``; the numbers that occur are equally likely, or most would be 1."""
    kinds, colours = (set(column) for column in _kinds_and_colours(scene))
    described = [Described(k) for k in range(len(CLASSES))]
    described += [Described(None, c) for c in range(len(COLOURS))]
    described += [Described(k, c) for k in sorted(kinds) for c in sorted(colours)]
    by_count: dict[int, list[Described]] = {}
    for what in described:
        by_count.setdefault(what.count(scene), []).append(what)
    number = rng.choice(sorted(by_count))
    what = rng.choice(by_count[number])
    entailed = (exists(what, "yes"),) if number and what.kind is not None else ()
    return Question(f"How many {what.words(2)} are there?", str(number), "count", "how many", entailed)


def name(scene: Scene, rng: Random) -> Question | None:
    """Ask ``What is the red thing?`` where one thing is red."""
    thing = _pick(scene, rng)
    what = Described(None, thing.colour, thing.large if rng.random() < 0.5 else None)
    if what.only(scene) is None:
        return None
    entailed = (exists(Described(thing.kind, thing.colour), "yes"), exists(Described(thing.kind), "yes"))
    return Question(f"What is the {what.words()}?", CLASSES[thing.kind], "name", "what is the", entailed)


_OUTERMOST = {"left": "leftmost", "right": "rightmost", "above": "topmost", "below": "lowest"}


def at_edge(scene: Scene, rng: Random) -> Question | None:
    """Ask ``What is the leftmost thing?`` or ``What color is the leftmost thing?``."""
    side = _side(rng)
    thing = outermost(side, scene)
    if thing is None:
        return None
    asked = f"{_OUTERMOST[side]} thing"
    entailed = (exists(Described(thing.kind), "yes"),)
    if rng.random() < 0.5:
        return Question(f"What is the {asked}?", CLASSES[thing.kind], "outermost", "what is the", entailed)
    return Question(f"What color is the {asked}?", COLOURS[thing.colour], "outermost", "what color is the")


_BESIDE = {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"}


def beside(scene: Scene, rng: Random) -> Question | None:
    """Ask ``What is to the left of the cup?`` where one thing is, and nothing is too close to say."""
    found, side = _unique(scene, rng), _side(rng)
    if found is None:
        return None
    what, thing = found
    sides = [(other, stands(side, other, thing)) for other in scene if other is not thing]
    there = [other for other, stand in sides if stand]
    if len(there) != 1 or any(stand is None for _, stand in sides):
        return None
    entailed = (exists(Described(there[0].kind), "yes"), exists(Described(thing.kind), "yes"))
    text = f"What is {_BESIDE[side]} the {what.words()}?"
    return Question(text, CLASSES[there[0].kind], "beside", "what is", entailed)


def on_side(scene: Scene, rng: Random) -> Question | None:
    """Ask ``Is the cup to the left of the red ball?`` of two things that words tell from all others."""
    first, second, side = _unique(scene, rng), _unique(scene, rng), _side(rng)
    if first is None or second is None or first[1] is second[1]:
        return None
    stand = stands(side, first[1], second[1])
    if stand is None:
        return None
    entailed = (exists(Described(first[1].kind), "yes"), exists(Described(second[1].kind), "yes"))
    text = f"Is the {first[0].words()} {_BESIDE[side]} the {second[0].words()}?"
    return Question(text, "yes" if stand else "no", "side", "is the", entailed)


def both(scene: Scene, rng: Random) -> Question | None:
    """Ask ``Is there a cup and a dog?``; where not, at most one of them is there."""
    present = sorted({thing.kind for thing in scene})
    absent = [k for k in range(len(CLASSES)) if k not in present]
    yes = rng.random() < 0.5
    if yes and len(present) < 2:
        return None
    pair = rng.sample(present, 2) if yes else [rng.choice(present), rng.choice(absent)]
    # In either order, so that the absent thing does not always come last.
    one, other = (Described(kind) for kind in rng.sample(pair, 2))
    entailed = (exists(one, "yes"), exists(other, "yes")) if yes else ()
    text = f"Is there a {one.words()} and a {other.words()}?"
    return Question(text, "yes" if yes else "no", "both", "is there a", entailed)


def more(scene: Scene, rng: Random) -> Question | None:
    """Ask ``Are there more cups than dogs?`` where the numbers differ."""
    present = sorted({thing.kind for thing in scene})
    if len(present) < 2:
        return None
    one, other = (Described(kind) for kind in rng.sample(present, 2))
    fewer, greater = sorted((one, other), key=lambda what: what.count(scene))
    if fewer.count(scene) == greater.count(scene):
        return None
    yes = rng.random() < 0.5
    first, second = (greater, fewer) if yes else (fewer, greater)
    text = f"Are there more {first.words(2)} than {second.words(2)}?"
    entailed = (exists(one, "yes"), exists(other, "yes"))
    return Question(text, "yes" if yes else "no", "more", "are there", entailed)


FORMS: dict[Callable[[Scene, Random], Question | None], float] = {
    **{exist: 3.0, colour: 2.0, is_coloured: 2.0, count: 2.0},
    **{name: 1.0, at_edge: 1.0, both: 1.0, beside: 0.5, on_side: 0.5, more: 0.5},
}
"""The kinds of question, with their frequencies."""


def _pick(scene: Scene, rng: Random) -> Thing:
    return rng.choice(scene)


def _coloured(thing: Thing) -> Described:
    return Described(thing.kind, thing.colour)


def _kinds_and_colours(scene: Scene) -> tuple[list[int], list[int]]:
    return [thing.kind for thing in scene], [thing.colour for thing in scene]


def _side(rng: Random) -> Side:
    return rng.choice(SIDES)


def _unique(scene: Scene, rng: Random) -> tuple[Described, Thing] | None:
    """A thing, and a description by class, or by size and class, that fits no other."""
    thing = _pick(scene, rng)
    for what in (Described(thing.kind), Described(thing.kind, None, thing.large)):
        if what.only(scene) is not None:
            return what, thing
    return None
