"""One type for a sentence or a question about one or two pictures, whatever file it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Example(NamedTuple):
    """A sentence or question.

    Attributes:
        id: as the official result file wants it: a number (VQA) or text (GQA, NLVR).
        pictures: names of the pictures, as `pretrain.regions.store.RegionStore.rows` takes them.
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
