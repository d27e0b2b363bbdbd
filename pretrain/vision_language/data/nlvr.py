"""NLVR2's and NLVR v1's official JSON lines (https://github.com/lil-lab/nlvr).

NLVR2 has statements about two photographs, NLVR v1 statements about drawn scenes, which its rows describe.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from capt.pretrain.base.records import Record
from capt.pretrain.regions.nlvr1 import scene_name
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document, Text, Unique


class _OfPhotographs(Record):
    identifier: Annotated[str, Field(pattern=r"^[^\s,]{1,200}-[0-9]+-[0-9]+-[0-9]+$")]
    sentence: Text
    label: Literal["True", "False"] | None = None


class _OfScene(Record):
    identifier: Annotated[str, Field(pattern=r"^[^\s,-]{1,100}-[^\s,-]{1,100}$")]
    sentence: Text
    structured_rep: Annotated[list[Any], Field(min_length=1)]
    label: Literal["true", "false"] | None = None


def are_of_photographs(document: Document) -> bool:
    """Whether the rows are NLVR2's."""
    return {"identifier", "sentence"} <= document.keys and "structured_rep" not in document.keys


def are_of_scenes(document: Document) -> bool:
    """Whether the rows are NLVR v1's."""
    return {"identifier", "sentence", "structured_rep"} <= document.keys


def read_photographs(document: Document) -> list[Example]:
    """The statements of NLVR2, left picture first: those of ``dev-850-0-0`` are ``dev-850-0-img0`` and ``-img1``.

    Raises:
        DataError: a row lacks a key, a value is of the wrong type, or an identifier occurs twice.
    """
    unique, examples = Unique("identifier"), []
    for place, row in document.checked(_OfPhotographs):
        unique.add(row.identifier, place)
        pair = row.identifier.rsplit("-", 1)[0]
        truth = None if row.label is None else row.label == "True"
        examples.append(Example(row.identifier, (f"{pair}-img0", f"{pair}-img1"), row.sentence, truth=truth))
    return examples


def read_scenes(document: Document) -> list[Example]:
    """The statements of NLVR v1. Their pictures are called as `capt.pretrain.regions.nlvr1.scene_name` calls them.

    The answer of a statement is its truth (``true``, ``false``).

    Raises:
        DataError: a row lacks a key, a value is of the wrong type, or an identifier occurs twice.
    """
    unique, examples = Unique("identifier"), []
    for row, (place, statement) in zip(document.rows, document.checked(_OfScene), strict=True):
        unique.add(statement.identifier, place)
        truth = None if statement.label is None else statement.label == "true"
        answers: dict[str, float] | None = None if statement.label is None else {statement.label: 1.0}
        examples.append(Example(statement.identifier, (scene_name(row),), statement.sentence, answers, truth))
    return examples
