"""NLVR v1's JSON lines (https://github.com/lil-lab/nlvr): statements about drawn scenes, which they describe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from capt.pretrain.base.records import Record
from capt.pretrain.regions.nlvr1 import scene_name
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document, Text, Unique


class _Statement(Record):
    identifier: Annotated[str, Field(pattern=r"^[^\s,-]{1,100}-[^\s,-]{1,100}$")]
    sentence: Text
    structured_rep: Annotated[list[Any], Field(min_length=1)]
    label: Literal["true", "false"] | None = None


def is_statements(document: Document) -> bool:
    """Whether the rows are NLVR v1's."""
    return {"identifier", "sentence", "structured_rep"} <= document.keys


def read_statements(document: Document) -> list[Example]:
    """The statements. Their pictures are called as `capt.pretrain.regions.nlvr1.scene_name` calls them.

    The answer of a statement is its truth (``true``, ``false``).

    Raises:
        DataError: a row lacks a key, a value is of the wrong type, or an identifier occurs twice.
    """
    unique, examples = Unique("identifier"), []
    for row, (place, statement) in zip(document.rows, document.checked(_Statement), strict=True):
        unique.add(statement.identifier, place)
        truth = None if statement.label is None else statement.label == "true"
        answers: dict[str, float] | None = None if statement.label is None else {statement.label: 1.0}
        examples.append(Example(statement.identifier, (scene_name(row),), statement.sentence, answers, truth))
    return examples
