"""VQA v2's official questions and annotations (https://visualqa.org), joined by ``question_id``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from sys import intern
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.base.records import Record
from capt.pretrain.vision_language.data.answers import normalise_answer, vqa_soft_score
from capt.pretrain.vision_language.data.examples import Example, coco_name, coco_subtype
from capt.pretrain.vision_language.data.files import Document, Name, Number, Text, Unique, checked, parts


class _Question(Record):
    question_id: Number
    image_id: Number | Name
    question: Text


def _texts(answers: Any) -> Any:
    """The annotators' answers; what is not an answer stays as it is, for the check to find."""
    if not isinstance(answers, list):
        return answers
    return [given["answer"] if isinstance(given, dict) and "answer" in given else given for given in answers]


_Answer = Annotated[str, Field(max_length=1 << 12)]


class _Annotation(Record):
    question_id: Number
    image_id: Number | Name | None = None
    answers: Annotated[list[_Answer], BeforeValidator(_texts), Field(min_length=1, max_length=1000)]
    multiple_choice_answer: _Answer | None = None
    answer_type: Annotated[str, Field(max_length=200)] = ""
    question_type: Annotated[str, Field(max_length=200)] = ""


class Annotation(NamedTuple):
    """The annotators' answers to a question.

    Attributes:
        id: ``question_id``.
        answers: one for each annotator, as written.
        answer_type: ``yes/no``, ``number`` or ``other``.
        question_type: the words with which the question begins.
        common: ``multiple_choice_answer``, the most frequent; None where the file has none.
        picture: ``image_id``; None where the file has none.
    """

    id: int
    answers: tuple[str, ...]
    answer_type: str
    question_type: str
    common: str | None
    picture: int | str | None


def is_questions(document: Document) -> bool:
    """Return whether this is a file of questions."""
    return isinstance(document.table.get("questions"), list)


def is_annotations(document: Document) -> bool:
    """Return whether this is a file of annotations."""
    rows = document.table.get("annotations")
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], dict) and "answers" in rows[0]


def read_annotations(documents: Iterable[Document]) -> dict[int, Annotation]:
    """The annotations of all files by ``question_id``.

    Raises:
        DataError: a row lacks a key, a value is of the wrong type, or a question is annotated twice.
    """
    unique = Unique("question_id")
    annotations = {}
    for document in documents:
        for place, row in checked(_Annotation, parts(document, "annotations")):
            unique.add(row.question_id, place)
            annotations[row.question_id] = Annotation(
                row.question_id,
                # Millions of rows have the same few texts: one object for each.
                tuple(map(intern, row.answers)),
                intern(row.answer_type),
                intern(row.question_type),
                row.multiple_choice_answer,
                row.image_id,
            )
    return annotations


def read_questions(questions: Sequence[Document], annotations: Sequence[Document]) -> list[Example]:
    """The questions of all files, with soft scores of the answers as written where there are annotations.

    Without a file of annotations (a test set) no question has answers. With one, each question needs its annotation and
    each annotation its question, in any order.

    Raises:
        DataError: a row lacks a key, a value is of the wrong type, a question occurs twice, or questions and
            annotations do not fit; the text counts these and names the first.
    """
    answers = read_annotations(annotations)
    unique, examples = Unique("question_id"), []
    bare: list[int] = []
    for document in questions:
        subtype = coco_subtype(str(document.table.get("data_subtype", "")), document.path.name)
        for place, row in checked(_Question, parts(document, "questions")):
            unique.add(row.question_id, place)
            name = (coco_name(row.image_id, subtype),)
            # Popped: what remains are annotations without a question.
            annotation = answers.pop(row.question_id, None)
            if annotation is None:
                bare.append(row.question_id)
                examples.append(Example(row.question_id, name, row.question))
                continue
            if annotation.picture not in (None, row.image_id):
                raise DataError(
                    f"{place}: image_id {row.image_id}, but {annotation.picture} in its annotation; they do not fit"
                )
            examples.append(_example(row, name, annotation))
    if annotations and (bare or answers):
        _refuse(questions, annotations, bare, list(answers))
    return examples


def soft_scores(answers: Sequence[str]) -> dict[str, float]:
    """The official score of each answer that the annotators gave, as they wrote it."""
    return {answer: vqa_soft_score(count, len(answers)) for answer, count in Counter(answers).items()}


def _example(row: _Question, name: tuple[str], annotation: Annotation) -> Example:
    common = None if annotation.common is None else intern(normalise_answer(annotation.common))
    scores = soft_scores(annotation.answers)
    return Example(row.question_id, name, row.question, scores, kind=annotation.answer_type, answer=common)


def _refuse(questions: Sequence[Document], annotations: Sequence[Document], bare: list[int], spare: list[int]) -> None:
    said = [
        f"{counted(len(ids), what)} without {lacking} ({', '.join(map(str, ids[:3]))}{', ...' if len(ids) > 3 else ''})"
        for ids, what, lacking in ((bare, "question", "annotation"), (spare, "annotation", "question"))
        if ids
    ]
    files = ", ".join(str(document.path) for document in (*questions, *annotations))
    raise DataError(f"{files}: {' and '.join(said)}; give the two files of the same questions")
