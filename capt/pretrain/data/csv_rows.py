"""Tables of separated cells: ``.csv`` and ``.tsv``. Every row has a place, and an error names it as a ``DataError``."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from itertools import chain
from typing import IO, Any

from capt.pretrain.base.errors import DataError, repeated, shown
from capt.pretrain.base.files import LONGEST_LINE, text_lines
from capt.pretrain.data.corpus import warn_once
from capt.pretrain.data.formats import ColumnTypes, Format, ReadOptions, TableRow, TextFile


class Csv(Format):
    """A header, commas, and quotes as in RFC 4180, so that a cell may have line breaks."""

    has_header = True
    quotes = True
    writes = True

    def rows(self, path: TextFile, raw: BufferedReader, reading: ReadOptions) -> Iterator[TableRow]:
        """Yield the rows. Raises ``DataError`` for a row that has not a cell for each column."""
        lines = (line.rstrip("\r\n") for _, line in text_lines(path, raw))
        first = next(lines, "")
        separator = self.separator(first, reading)
        quotes = self.quotes if reading.quotes is None else reading.quotes
        header: list[str] | None = None
        for number, cells in _records(path, chain([first], lines), separator, quotes, reading.remedy):
            if header is None:
                header = _header(path, cells, separator)
                chosen = set(reading.choose(header))
            # In a table of one column a blank line is an empty cell.
            elif cells or len(header) == 1:
                cells = cells or [""]
                place = f"{path}, line {number}"
                if len(cells) != len(header):
                    raise DataError(
                        f"{place}: {len(cells)} cells, and {len(header)} in the first line "
                        f"({', '.join(shown(name, 40) for name in header[:10])}); {_advice(quotes, reading.remedy)}"
                    )
                _require_no_header(place, header, cells)
                row = {name: cell for name, cell in zip(header, cells, strict=True) if name in chosen}
                yield TableRow(place, number, row)

    def write(self, file: IO[bytes], columns: ColumnTypes, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a header and the rows; a list is written as JSON."""
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            cells = (row[name] for name in columns)
            writer.writerow(
                [json.dumps(cell, ensure_ascii=False) if isinstance(cell, list) else cell for cell in cells]
            )
        # Else the file would be closed with its wrapper.
        text.detach()

    def separator(self, first: str, reading: ReadOptions) -> str:
        """Return what separates the cells, by the first line."""
        return next((mark for mark in reading.separators if mark in first), ",")


class Tsv(Csv):
    """A header and tabs. There is no quoting, as in GLUE: a quotation mark is text."""

    quotes = False
    writes = False

    def separator(self, first: str, reading: ReadOptions) -> str:
        """Return the tab."""
        return "\t"


def _advice(quotes: bool, remedy: str) -> str:
    if quotes:
        return (
            'put a text with a separator or a quote between double quotes, each quote in it doubled: "He said ""no"""'
        )
    return f"no cell may hold a tab; if texts are between double quotes {remedy}"


def _records(
    path: TextFile, lines: Iterable[str], separator: str, quotes: bool, remedy: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of the header and of every row, none of a blank line, with the number of the first line."""
    if not quotes:
        quoted = _QuotedCells(path, remedy)
        for number, line in enumerate(lines, start=1):
            yield number, quoted.counted(number, line.split(separator) if line else [])
        quoted.report()
        return
    # Python's own limit is 128 Ki characters a cell.
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader((f"{line}\n" for line in lines), delimiter=separator, strict=True)
    quoted = _QuotedCells(path, "write no space before the quotes", behind=" ")
    begin = 1
    try:
        for cells in reader:
            yield begin, quoted.counted(begin, cells)
            # A row between quotes may have several lines; the next one begins behind them.
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {begin}: not CSV ({_problem(error)}); a cell with separators, quotes or line breaks has "
            "quotes around it, and a quote in it is doubled"
        ) from None
    quoted.report()


def _problem(error: csv.Error) -> str:
    """Say what is wrong with a row, where Python's words are about its own functions."""
    if "new-line character" in str(error):
        return r"a carriage return alone: if all lines end so, tr '\r' '\n' < FILE converts them"
    return str(error)


class _QuotedCells:
    """Cells between double quotes that do not count as quotes: a program wrote them, or they belong to the text.

    No quotes count in a file without quoting, and in csv not those ``behind`` a space.
    """

    def __init__(self, path: object, remedy: str, behind: str = "") -> None:
        self._path, self._remedy, self._rows, self._first = path, remedy, 0, 0
        self._start = f'{behind}"'

    def counted(self, number: int, cells: list[str]) -> list[str]:
        """Count a row and return it. Raises ``DataError`` for a first row that is quoted throughout."""
        quoted = [len(cell) > 1 and cell.startswith(self._start) and cell[-1] == '"' for cell in cells]
        if number == 1 and quoted and all(quoted):
            raise DataError(
                f"{self._path}, line 1: the names of the columns are between double quotes, which belong to the text "
                f"here; {self._remedy}"
            )
        if any(quoted):
            self._rows += 1
            self._first = self._first or number
        return cells

    def report(self) -> None:
        """Say how many rows have such cells."""
        if self._rows:
            warn_once(
                f"{self._path}: {self._rows:,} rows have a cell between double quotes, the first is line "
                f"{self._first}; they are read as a part of the text. If they are not, {self._remedy}"
            )


def require_one_of_each(path: object, names: Sequence[str], where: str = "") -> None:
    """Raise ``DataError`` where a table has two columns of one name, of which a row would keep one.

    Columns without a name are what a spreadsheet has behind its last one.
    """
    if twice := repeated(filter(None, names)):
        raise DataError(f"{path}{where}: two columns have the name {shown(twice)}; rename one of the two")


_OF_EXCEL = re.compile(r"sep=.?", re.IGNORECASE)


def _header(path: object, cells: Sequence[str], separator: str) -> list[str]:
    """Return the names of the columns in a first line. Raises ``DataError`` where it does not name them."""
    names = [cell.strip() for cell in cells]
    if not any(names):
        raise DataError(f"{path}, line 1: empty; the first line must name the columns")
    if _OF_EXCEL.fullmatch("".join(names)):
        raise DataError(
            f"{path}, line 1: {shown(names[0])} tells Excel the separator and names no column; remove the line: "
            "tail -n +2 FILE"
        )
    if quoted := next((name for name in names if len(name) > 1 and name[0] == name[-1] == '"'), None):
        raise DataError(
            f"{path}, line 1: the name {quoted} is between double quotes that do not count as such; write none, and no "
            "space before those of cells"
        )
    require_one_of_each(path, names, ", line 1")
    other = next((mark for mark in ("\t", ";", "|", ",") if mark != separator and mark in "".join(names)), None)
    if len(names) == 1 and other is not None:
        raise DataError(
            f"{path}, line 1: one column, {shown(names[0])}: are the cells separated by {other!r}? "
            "In .csv they are by commas, in .tsv by tabs"
        )
    return names


def _require_no_header(place: str, header: Sequence[str], cells: Sequence[str]) -> None:
    """Raise ``DataError`` for a row that repeats the first line, as files that were joined have it."""
    if len(header) > 1 and cells[0].strip() == header[0] and [cell.strip() for cell in cells] == header:
        raise DataError(f"{place}: repeats the names of the columns, as joined files do; remove the line")
