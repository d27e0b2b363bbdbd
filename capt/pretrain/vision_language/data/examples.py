"""A type for a sentence or a question about one or two pictures, whatever file it was read from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

# How pictures are called in region stores, told from how data files call them.


_SUBTYPE = re.compile(r"(?<![a-z0-9])(train2014|val2014|test2014|test2015|test-dev2015)(?![0-9])")


def coco_subtype(*texts: str) -> str | None:
    """The set of pictures (``train2014``) that a file's ``data_subtype`` or name tells; None where none does.

    Only sets whose pictures are called after them: those of 2017 are called by their numbers.
    """
    for text in texts:
        if found := _SUBTYPE.search(text.lower()):
            return found[1].replace("test-dev", "test")
    return None


def coco_name(number: int | str, subtype: str | None) -> str:
    """``COCO_train2014_000000458752``; the number alone where the set is unknown; a text as it is."""
    if isinstance(number, str) or subtype is None:
        return str(number)
    return f"COCO_{subtype}_{number:012d}"


class Example(NamedTuple):
    """A sentence or question.

    Attributes:
        id: as the official result file wants it: a number (VQA) or text (GQA, NLVR).
        pictures: names of the pictures, as `capt.pretrain.regions.store.RegionStore.rows` takes them.
        text: the sentence or question.
        answers: score of each answer (VQA's soft scores; GQA 1.0); ``{}`` for a question of which no answer is in the
            table; None where the file holds no answers.
        truth: of a statement about its pictures (NLVR); None for a caption, which is true, and for a question.
        kind: the official type of the question or its answer (``yes/no``), or ``""``.
        answer: the answer that an answer table counts, as it counts it (VQA's ``multiple_choice_answer``, normalised);
            None where there is none, or where it is the first of the best in ``answers``.
        counts: whether accuracy counts it; False for GQA's questions that are not balanced.
    """

    id: int | str
    pictures: tuple[str, ...]
    text: str
    answers: Mapping[str, float] | None = None
    truth: bool | None = None
    kind: str = ""
    answer: str | None = None
    counts: bool = True
