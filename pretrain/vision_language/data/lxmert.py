"""LXMERT's own JSON files (https://github.com/airsplay/lxmert): pretraining, VQA, GQA and NLVR2."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pretrain.base.errors import DataError
from pretrain.base.records import Record
from pretrain.vision_language.data.examples import Example
from pretrain.vision_language.data.files import Document, Name, Number, Scores, Text, Unique


class _Picture(Record):
    img_id: Name
    sentf: dict[Name, list[Text]]
    labelf: dict[Name, list[Scores]] = Field(default={})


class _Question(Record):
    question_id: Number | Name
    img_id: Name
    sent: Text
    label: Scores | None = None
    answer_type: str = ""
    question_type: str = ""


class _Statement(Record):
    identifier: Annotated[str, Field(pattern=r"^[^\s,]{1,200}$")]
    img0: Name
    img1: Name
    sent: Text
    label: Literal[0, 1] | None = None


def is_pretraining(document: Document) -> bool:
    """Whether the rows are pictures with all their sentences."""
    return {"img_id", "sentf"} <= document.keys


def is_questions(document: Document) -> bool:
    """Whether the rows are questions about one picture (VQA or GQA)."""
    return {"img_id", "sent"} <= document.keys


def is_statements(document: Document) -> bool:
    """Whether the rows are statements about two pictures (NLVR2)."""
    return {"img0", "sent"} <= document.keys


def read_pretraining(document: Document) -> list[Example]:
    """One example for each pair of a picture and a sentence; ``kind`` is the sentence's source (``mscoco``, ``vqa``).

    A source that is in ``labelf`` too holds questions, and has one set of scored answers for each sentence.

    Raises:
        DataError: a row lacks a key, a value is of the wrong type, or the numbers of labels and sentences differ.
    """
    examples = []
    for place, row in document.checked(_Picture):
        if without := sorted(set(row.labelf) - set(row.sentf)):
            raise DataError(f"{place}: labelf has {without[0]!r}, which sentf lacks")
        for kind, sentences in row.sentf.items():
            labels = row.labelf.get(kind)
            if labels is not None and len(labels) != len(sentences):
                raise DataError(
                    f"{place}: {len(sentences)} sentences but {len(labels)} labels of {kind!r}; each needs one"
                )
            for i, sentence in enumerate(sentences):
                answers = None if labels is None else labels[i]
                examples.append(Example(f"{row.img_id}#{kind}{i}", (row.img_id,), sentence, answers, kind=kind))
    return examples


def read_questions(document: Document) -> list[Example]:
    """The questions of VQA (numbered) or GQA (ids are text); a row without ``label`` has no known answer.

    Raises:
        DataError: a row lacks a key, a value is of the wrong type, or a ``question_id`` occurs twice.
    """
    unique, examples = Unique("question_id"), []
    for place, row in document.checked(_Question):
        unique.add(row.question_id, place)
        examples.append(Example(row.question_id, (row.img_id,), row.sent, row.label, kind=row.answer_type))
    return examples


def read_statements(document: Document) -> list[Example]:
    """The statements of NLVR2, left picture first. Raises ``DataError`` as `read_questions` does."""
    unique, examples = Unique("identifier"), []
    for place, row in document.checked(_Statement):
        unique.add(row.identifier, place)
        truth = None if row.label is None else row.label == 1
        examples.append(Example(row.identifier, (row.img0, row.img1), row.sent, truth=truth))
    return examples
