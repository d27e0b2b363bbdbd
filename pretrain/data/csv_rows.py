"""The rows of csv and tsv files, from their lines. Every row has a place, and an error names it as a ``DataError``."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from typing import Any

from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.files import LONGEST_LINE

Row = tuple[str, dict[str, Any]]
"""The place of a row, ``FILE:LINE`` (``FILE:ROW`` where a file has no lines), and its cells by column."""


def csv_rows(path: object, lines: Iterable[str]) -> Iterator[Row]:
    """The rows of a file with a header, commas, and quotes as in RFC 4180, so that a cell may have line breaks."""
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader((line + "\n" for line in lines), strict=True)
    header: list[str] | None = None
    begin = 1
    try:
        for cells in reader:
            if header is None:
                header = _header(path, cells, ",")
            elif cells or len(header) == 1:
                yield f"{path}:{begin}", _cells(path, begin, header, cells or [""])
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {begin}: not CSV ({error}); a cell with commas, quotes or line breaks has quotes around it, "
            "and a quote in it is doubled"
        ) from None


def tsv_rows(path: object, lines: Iterable[str]) -> Iterator[Row]:
    """The rows of a file with a header and tabs. There is no quoting, as in GLUE: a quotation mark is text."""
    header: list[str] | None = None
    for number, line in enumerate(lines, start=1):
        if header is None:
            header = _header(path, line.split("\t"), "\t")
        elif line or len(header) == 1:
            yield f"{path}:{number}", _cells(path, number, header, line.split("\t"))


def _header(path: object, cells: list[str], separator: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{path}, line 1: two columns have the name {shown(twice)}; the first line names the columns")
    other = next((mark for mark in ("\t", ";", "|", ",") if mark != separator and mark in "".join(names)), None)
    if len(names) == 1 and other is not None:
        raise DataError(
            f"{path}, line 1: one column, {shown(names[0])}: are the cells separated by {other!r}? "
            "In .csv they are by commas, in .tsv by tabs"
        )
    return names


def _cells(path: object, number: int, header: list[str], cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(header):
        raise DataError(
            f"{path}, line {number}: {len(cells)} columns; the header has {len(header)} "
            f"({', '.join(shown(name, 40) for name in header[:10])})"
        )
    return dict(zip(header, cells, strict=True))
