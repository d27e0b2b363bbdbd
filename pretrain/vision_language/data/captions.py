"""Captions: COCO's JSON (annotations or results) and Flickr8k's token file. A caption is true of its picture."""

from __future__ import annotations

import re

from pretrain.base.errors import DataError, shown
from pretrain.base.records import Record
from pretrain.vision_language.data.examples import Example
from pretrain.vision_language.data.files import Document, Name, Number, Text, checked, parts
from pretrain.vision_language.data.pictures import coco_name, coco_subtype, file_stem


class _Caption(Record):
    image_id: Number | Name
    caption: Text
    id: Number | None = None


class _Image(Record):
    id: Number | Name
    file_name: Name


def is_annotations(document: Document) -> bool:
    """Whether this is COCO's ``captions_*.json``."""
    rows = document.table.get("annotations")
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], dict) and "caption" in rows[0]


def is_results(document: Document) -> bool:
    """Whether the rows are captions in the form of COCO's results."""
    return {"image_id", "caption"} <= document.keys


def is_tokens(document: Document) -> bool:
    """Whether the lines are Flickr8k's (``PICTURE.jpg#k TAB caption``)."""
    return bool(document.rows) and isinstance(document.rows[0], str) and _TOKENS.fullmatch(document.rows[0]) is not None


def read_annotations(document: Document) -> list[Example]:
    """COCO's captions. Pictures are called as their files are, where ``images`` names these.

    Raises:
        DataError: a caption or picture lacks a key, or a value is of the wrong type.
    """
    files = {}
    if document.table.get("images"):
        files = {row.id: file_stem(row.file_name) for _, row in checked(_Image, parts(document, "images"))}
    return _examples(document, list(checked(_Caption, parts(document, "annotations"))), files)


def read_results(document: Document) -> list[Example]:
    """Captions as a list of ``image_id`` and ``caption``. Raises ``DataError`` as `read_annotations` does."""
    return _examples(document, list(document.checked(_Caption)), {})


def _examples(document: Document, rows: list[tuple[str, _Caption]], files: dict[int | str, str]) -> list[Example]:
    subtype = coco_subtype(document.path.name)
    examples = []
    for i, (_, row) in enumerate(rows):
        stem = files.get(row.image_id, "")
        name = coco_name(row.image_id, subtype) if not stem or stem.isdigit() else stem
        examples.append(Example(i if row.id is None else row.id, (name,), row.caption))
    return examples


_TOKENS = re.compile(r"([^\t#\x00-\x1f]{1,512})#([0-9]{1,6})[\t ] *(\S.*)", re.DOTALL)


def read_tokens(document: Document) -> list[Example]:
    """Flickr8k's captions. Raises ``DataError`` for a line of another form."""
    examples = []
    for i, line in enumerate(document.rows):
        parsed = _TOKENS.fullmatch(line)
        if parsed is None:
            raise DataError(f"{document.place(i)}: {shown(line)} is not PICTURE.jpg#k TAB caption")
        examples.append(Example(f"{parsed[1]}#{parsed[2]}", (file_stem(parsed[1]),), parsed[3]))
    return examples
