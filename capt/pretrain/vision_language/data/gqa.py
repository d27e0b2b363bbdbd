"""GQA's official question files (https://cs.stanford.edu/people/dorarad/gqa/), one JSON object by question id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.records import Record
from capt.pretrain.vision_language.data import captions
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document, Name, Text, checked, read_document


class _Types(Record):
    structural: str = ""
    semantic: str = ""
    detailed: str = ""


class _Groups(Record):
    global_: str | None = Field(default=None, alias="global")


class _Question(Record):
    picture: Name = Field(alias="imageId")
    question: Text
    answer: Annotated[str, Field(max_length=1 << 12)] | None = None
    balanced: bool = Field(default=True, alias="isBalanced")
    entailed: list[Name] = Field(default=[], max_length=1 << 16)
    types: _Types = _Types()
    groups: _Groups = _Groups()
    steps: int | None = None


class _Choices(Record):
    valid: list[str]
    plausible: list[str]


class GqaQuestion(NamedTuple):
    """A question with what GQA's metrics need.

    Attributes:
        id: text, also where it is a number.
        answer: the right one, as text; None in a file without answers.
        balanced: whether accuracy counts it.
        entailed: ids of questions whose answers follow from this one's.
        kind: the structural type: ``verify``, ``query``, ``choose``, ``logical`` or ``compare``.
        semantic: the semantic type: ``attr``, ``cat``, ``global``, ``obj`` or ``rel``.
        detailed: the detailed type.
        group: the group of questions within which answers are distributed; None where it is in none.
        steps: of reasoning; None where the file does not say.
    """

    id: str
    picture: str
    text: str
    answer: str | None
    balanced: bool
    entailed: tuple[str, ...]
    kind: str
    semantic: str = ""
    detailed: str = ""
    group: str | None = None
    steps: int | None = None


class Choices(NamedTuple):
    """Answers that a question may have, and those that make sense in the world, of GQA's file of choices."""

    valid: frozenset[str]
    plausible: frozenset[str]


def is_choices(document: Document) -> bool:
    """Return whether the object holds the choices of questions by their ids."""
    first = next(iter(document.table.values()), None)
    return isinstance(first, dict) and {"valid", "plausible"} <= first.keys()


def gqa_choices(document: Document) -> dict[str, Choices]:
    """The choices of each question. Raises ``DataError`` that names question and key."""
    rows = ((f"{document.path}, question {key[:100]!r}", row) for key, row in document.table.items())
    kept: dict[tuple[str, ...], frozenset[str]] = {}  # many questions have the same choices

    def shared(answers: list[str]) -> frozenset[str]:
        return kept.setdefault(tuple(answers), frozenset(answers))

    return {
        key: Choices(shared(row.valid), shared(row.plausible))
        for key, (_, row) in zip(document.table, checked(_Choices, rows), strict=True)
    }


def is_official(document: Document) -> bool:
    """Return whether the object holds questions by their ids."""
    first = next(iter(document.table.values()), None)
    return isinstance(first, dict) and "imageId" in first


def read_official(document: Document) -> list[Example]:
    """The questions, balanced and others. Raises ``DataError`` that names question and key."""
    return [
        Example(
            question.id,
            (question.picture,),
            question.text,
            None if question.answer is None else {question.answer: 1.0},
            kind=question.kind,
            counts=question.balanced,
        )
        for question in _questions(document)
    ]


def read_gqa_questions(path: Path) -> list[GqaQuestion]:
    """Read GQA's official questions, or LXMERT's JSON of them, all of which are balanced and entail none.

    Raises:
        DataError: the file is neither, or damaged, or a question lacks a key.
    """
    return gqa_questions(read_document(path))


def gqa_questions(document: Document) -> list[GqaQuestion]:
    """`read_gqa_questions` of a file that has been parsed."""
    if is_official(document):
        return list(_questions(document))
    if not captions.is_questions(document):
        raise DataError(f"{document.path}: not GQA's questions: neither the official file nor LXMERT's JSON")
    return [
        GqaQuestion(str(row.id), row.pictures[0], row.text, next(iter(row.answers or ()), None), True, (), row.kind)
        for row in captions.read_questions(document)
    ]


def _questions(document: Document) -> Iterator[GqaQuestion]:
    ids = list(document.table)
    rows = ((f"{document.path}, question {key[:100]!r}", row) for key, row in document.table.items())
    for key, (place, row) in zip(ids, checked(_Question, rows), strict=True):
        if not key or not key.isprintable():
            raise DataError(f"{place}: the id is not printable text")
        yield GqaQuestion(
            key, row.picture, row.question, row.answer, row.balanced, tuple(row.entailed), row.types.structural,
            row.types.semantic, row.types.detailed, row.groups.global_, row.steps,
        )  # fmt: skip
