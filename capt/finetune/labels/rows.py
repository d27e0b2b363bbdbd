"""Rows of labelled texts as they are in a file: texts, and the cells of their labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from capt.finetune.columns import Columns, cell_in, find_columns, open_labelled, text_in
from capt.finetune.labels.config import LabelsData
from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.overlap import same_text
from capt.pretrain.data.tables import FileTable

_T = TypeVar("_T")


@dataclass(frozen=True)
class Labelled:
    """Rows as they are in a file: the label is a cell, or the tuple of the cells of several columns."""

    path: Path
    columns: Columns
    places: list[str]
    first: list[str]
    second: list[str] | None
    cells: list[Any]
    classes: tuple[str, ...] = ()
    """The names of the classes, where the schema of the file has them; cells are names then."""

    def __len__(self) -> int:
        return len(self.first)

    def texts(self) -> Iterator[tuple[str, ...]]:
        """Yield the texts of each row, as texts that count as the same are alike."""
        columns = [self.first] if self.second is None else [self.first, self.second]
        return (tuple(map(same_text, texts)) for texts in zip(*columns, strict=True))

    def chosen(self, numbers: Sequence[int]) -> Labelled:
        """Return the rows of these numbers."""

        def take(values: list[_T]) -> list[_T]:
            return [values[i] for i in numbers]

        second = None if self.second is None else take(self.second)
        return replace(self, places=take(self.places), first=take(self.first), second=second, cells=take(self.cells))


def read_rows(path: Path, data: LabelsData) -> Labelled:
    """Read the texts and labels of a file. Raises ``DataError`` for a row without a text, or without the columns."""
    table = open_labelled(path, data.quotes)
    columns = find_columns(table, data.text, data.second, data.label_columns)
    classes = _file_classes(table, columns, data)
    rows = Labelled(path, columns, [], [], None if columns.second is None else [], [], classes)
    for place, _, cells in table.rows:
        rows.places.append(place)
        rows.first.append(text_in(cells, columns.text, place))
        if rows.second is not None and columns.second is not None:
            rows.second.append(text_in(cells, columns.second, place))
        found = tuple(cell_in(cells, name, place) for name in columns.labels)
        if classes:
            found = (_named(found[0], classes, place, columns.labels[0]),)
        rows.cells.append(found if isinstance(data.label, list) else found[0])
    return rows


def _file_classes(table: FileTable, columns: Columns, data: LabelsData) -> tuple[str, ...]:
    """The names of the classes that a file has of its own; none where the job reads its numbers."""
    # Several columns are flags, and scores are numbers.
    if isinstance(data.label, list) or data.kind == "regression":
        return ()
    names = tuple(table.classes.get(columns.labels[0], ()))
    listed = set(data.labels or ())
    is_by_number = not listed.issuperset(names) and listed.issuperset(map(str, range(len(names))))
    return () if is_by_number else names


def _named(cell: Any, classes: Sequence[str], place: str, column: str) -> Any:
    """A cell with the names of its classes; None for -1, which ``datasets`` has where there is no label."""
    if isinstance(cell, list):
        return [_named(each, classes, place, column) for each in cell]
    if cell is None or isinstance(cell, str) or cell == -1:
        return None if cell == -1 else cell
    if not isinstance(cell, int) or not 0 <= cell < len(classes):
        raise DataError(
            f"{place}: {column!r} is {shown(cell)}, and its schema names {len(classes)} classes, numbered "
            "from 0; correct or remove the row"
        )
    return classes[cell]
