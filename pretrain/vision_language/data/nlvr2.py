"""NLVR2's official JSON lines (https://github.com/lil-lab/nlvr): statements about two photographs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from capt.pretrain.base.records import Record
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document, Text, Unique


class _Statement(Record):
    identifier: Annotated[str, Field(pattern=r"^[^\s,]{1,200}-[0-9]+-[0-9]+-[0-9]+$")]
    sentence: Text
    label: Literal["True", "False"] | None = None


def is_statements(document: Document) -> bool:
    """Whether the rows are NLVR2's, and not those of NLVR v1, which describe their scenes."""
    return {"identifier", "sentence"} <= document.keys and "structured_rep" not in document.keys


def read_statements(document: Document) -> list[Example]:
    """The statements, left picture first: those of ``dev-850-0-0`` are ``dev-850-0-img0`` and ``dev-850-0-img1``.

    Raises:
        DataError: a row lacks a key, a value is of the wrong type, or an identifier occurs twice.
    """
    unique, examples = Unique("identifier"), []
    for place, row in document.checked(_Statement):
        unique.add(row.identifier, place)
        pair = row.identifier.rsplit("-", 1)[0]
        truth = None if row.label is None else row.label == "True"
        examples.append(Example(row.identifier, (f"{pair}-img0", f"{pair}-img1"), row.sentence, truth=truth))
    return examples
