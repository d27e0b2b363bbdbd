"""Captions (COCO's JSON, Flickr8k's token file, rows of ``image`` and ``caption``), and the JSON files of LXMERT.

A caption is true of its picture.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.records import Record
from capt.pretrain.regions.picture import picture_name
from capt.pretrain.vision_language.data.examples import Example, coco_name, coco_subtype
from capt.pretrain.vision_language.data.files import Document, Name, Number, Scores, Text, Unique, checked, parts


class _Caption(Record):
    image_id: Number | Name
    caption: Text
    id: Number | None = None


class _OwnCaption(Record):
    image: Number | Name
    caption: Text | Annotated[list[Text], Field(min_length=1, max_length=1000)]


class _Image(Record):
    id: Number | Name
    file_name: Name


def is_annotations(document: Document) -> bool:
    """Return whether this is COCO's ``captions_*.json``."""
    rows = document.table.get("annotations")
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], dict) and "caption" in rows[0]


def is_results(document: Document) -> bool:
    """Return whether the rows are captions in the form of COCO's results."""
    return {"image_id", "caption"} <= document.keys


def is_own(document: Document) -> bool:
    """Return whether the rows are objects with ``image`` and ``caption``: JSON lines, or a JSON list."""
    return {"image", "caption"} <= document.keys


def is_table(document: Document) -> bool:
    """Return whether the first line names the columns ``image`` and ``caption`` of a table with commas or tabs."""
    first = document.rows[0] if document.rows else None
    return isinstance(first, str) and {"image", "caption"} <= {*_cells(first, _separator(first))}


def is_tokens(document: Document) -> bool:
    """Return whether the lines are Flickr8k's (``PICTURE.jpg#k TAB caption``)."""
    return bool(document.rows) and isinstance(document.rows[0], str) and _TOKENS.fullmatch(document.rows[0]) is not None


def read_annotations(document: Document) -> list[Example]:
    """COCO's captions. Pictures are called as their files are, where ``images`` names these.

    Raises:
        DataError: a caption or picture lacks a key, or a value is of the wrong type.
    """
    files = {}
    if document.table.get("images"):
        unique, names = Unique("id"), _Names()
        for place, row in checked(_Image, parts(document, "images")):
            unique.add(row.id, place)
            files[row.id] = names.of(row.file_name, place)
    return _examples(document, list(checked(_Caption, parts(document, "annotations"))), files)


def read_results(document: Document) -> list[Example]:
    """Captions as a list of ``image_id`` and ``caption``. Raises ``DataError`` as `read_annotations` does."""
    return _examples(document, list(document.checked(_Caption)), {})


def read_own(document: Document) -> list[Example]:
    """Captions as objects of ``image``, the name or path of a picture's file, and ``caption``, one or a list of them.

    Raises:
        DataError: a row lacks a key, or a value is of the wrong type.
    """
    return _own_examples(document.checked(_OwnCaption))


def read_table(document: Document) -> list[Example]:
    """Captions as a table; other columns than ``image`` and ``caption`` are not read.

    A cell between double quotes may hold separators and line ends. Both in one cell between tabs are rows that a quote
    has joined which was text: many tools write such tables without quotes.

    Raises:
        DataError: a row has another number of columns than the first line, or no image or caption; a quote that is
            open, or continues after its end; a column of which the first line has two.
    """
    separator = _separator(document.rows[0])
    # The lines have lost their ends, which a quoted cell that goes over several lines keeps.
    reader = csv.reader((f"{line}\n" for line in document.rows), delimiter=separator, strict=True)
    header = _cells(document.rows[0], separator)
    if twice := next((name for name in ("image", "caption") if header.count(name) > 1), None):
        raise DataError(f"{document.place(0)}: the column {twice} occurs twice; leave one of the two out")
    next(reader)

    def rows() -> Iterator[tuple[str, object]]:
        first = 1
        try:
            for cells in reader:
                # A row may go over several lines; its place is that of the first.
                place, first = document.place(first), reader.line_num
                if separator == "\t" and any("\t" in cell and "\n" in cell for cell in cells):
                    raise DataError(f"{place}: a double quote joins rows of the table; {_QUOTES}")
                if len(cells) != len(header):
                    raise DataError(f"{place}: {len(cells)} columns, and {len(header)} in the first line")
                yield place, dict(zip(header, (cell.strip() for cell in cells), strict=True))
        except csv.Error as problem:
            raise DataError(f"{document.place(first)}: not a row of a table: {problem}; {_QUOTES}") from None

    return _own_examples(checked(_OwnCaption, rows()))


def _own_examples(rows: Iterable[tuple[str, _OwnCaption]]) -> list[Example]:
    examples: list[Example] = []
    names = _Names()
    for place, row in rows:
        picture = names.of(row.image, place) if isinstance(row.image, str) else str(row.image)
        for caption in [row.caption] if isinstance(row.caption, str) else row.caption:
            examples.append(Example(len(examples), (picture,), caption))
    return examples


class _Names:
    """The pictures by the names of their files without the endings, as a region store has them."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}

    def of(self, file: str, place: str) -> str:
        """The name of a picture. Raises ``DataError`` where another picture above has it too."""
        name = picture_name(file)
        if Path(first := self._files.setdefault(name, file)) != Path(file):
            raise DataError(
                f"{place}: {shown(file)} and {shown(first)} above are both called {shown(name)}, without the ending; "
                "give each picture a name of its own, here and in the region store"
            )
        return name


_QUOTES = """write a cell that begins with a double quote as "..." with each quote in it doubled"""


def _separator(header: str) -> str:
    return "\t" if "\t" in header else ","


def _cells(header: str, separator: str) -> list[str]:
    return [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]


def _examples(document: Document, rows: list[tuple[str, _Caption]], files: dict[int | str, str]) -> list[Example]:
    subtype = coco_subtype(document.path.name)
    examples = []
    for i, (_, row) in enumerate(rows):
        name = files.get(row.image_id, "")
        # The number alone says nothing of the set that COCO's pictures are of, and folders that are not COCO's do.
        if not name or name.isdigit() or (subtype is not None and name.rpartition("/")[2].isdigit()):
            name = coco_name(row.image_id, subtype)
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
        examples.append(Example(f"{parsed[1]}#{parsed[2]}", (picture_name(parsed[1]),), parsed[3]))
    return examples


# LXMERT's own JSON files (https://github.com/airsplay/lxmert): pretraining, VQA, GQA and NLVR2.


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
    """Return whether the rows are pictures with all their sentences."""
    return {"img_id", "sentf"} <= document.keys


def is_questions(document: Document) -> bool:
    """Return whether the rows are questions about one picture (VQA or GQA)."""
    return {"img_id", "sent"} <= document.keys


def is_statements(document: Document) -> bool:
    """Return whether the rows are statements about two pictures (NLVR2)."""
    return {"img0", "sent"} <= document.keys


def read_pretraining(document: Document) -> list[Example]:
    """Read an example for each picture and sentence; ``kind`` is the sentence's source (``mscoco``, ``vqa``).

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
