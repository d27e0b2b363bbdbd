"""Tables of JSON lines: one object a line, or one list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from itertools import chain, islice
from typing import IO, Any

from capt.pretrain.base.errors import DataError, quoted
from capt.pretrain.base.files import parse_row, place_after, text_lines
from capt.pretrain.data.formats import ColumnTypes, Format, ReadOptions, TableRow, TextFile

_NESTED = re.compile(r"\s*\[\s*[\[{]")
_OBJECTS = "; write one object a line: jq -c '.[]' FILE"
_ONE_A_LINE = "; write one object a line, with nothing behind it: jq -c . FILE"


class JsonLines(Format):
    """JSON lines. Blank lines are passed over, and rows may lack a key that others have."""

    parts = "lines"
    writes = True

    def write(self, file: IO[bytes], columns: ColumnTypes, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write an object a line."""
        for row in rows:
            line = json.dumps({name: row[name] for name in columns}, ensure_ascii=False)
            file.write(line.encode() + b"\n")

    def rows(self, path: TextFile, raw: BufferedReader, reading: ReadOptions) -> Iterator[TableRow]:
        """Yield the objects. Raises ``DataError`` for a line that is no object (`ReadOptions.keys`)."""
        begin = 0 if reading.span is None else reading.span.begin
        after = place_after(begin)
        lines = ((number, line) for number, line in text_lines(path, raw, begin=begin) if not line.isspace())
        first = [*islice(lines, 1)]
        if first and _NESTED.match(first[0][1]):
            first += islice(lines, 1)
        # A list of lists on the only line is a whole table, and else a row whose cells are lists.
        is_table = len(first) == 1 and _NESTED.match(first[0][1]) is not None
        for number, line in chain(first, lines):
            place = f"{path}, line {number}{after}"
            yield TableRow(place, number, _object(place, line, reading.keys, is_table=is_table))


def _object(place: str, line: str, keys: Sequence[str], *, is_table: bool) -> dict[str, Any]:
    try:
        row = parse_row(line)
    except json.JSONDecodeError as error:
        is_part = error.msg == "Extra data" or line.strip() in ("{", "[{")
        is_list = line.lstrip().startswith("[")
        hint = _OBJECTS if is_list else _ONE_A_LINE if is_part else "; correct the line, or remove it"
        raise DataError(f"{place}, column {error.colno}: not JSON ({error.msg}){hint}") from None
    except (ValueError, RecursionError) as error:  # a key twice, a number of thousands of digits, a thousand brackets
        raise DataError(f"{place}: not JSON that can be read ({error}); correct the line, or remove it") from None
    is_table &= isinstance(row, list) and all(isinstance(value, list | dict) for value in row)
    if isinstance(row, list) and not keys and not is_table:
        return {f"column {i}": value for i, value in enumerate(row, start=1)}
    if not isinstance(row, dict):
        hint = _list_remedy(row, keys) if isinstance(row, list) else ""
        raise DataError(f"{place}: a JSON object is needed, this is a {type(row).__name__}{hint}")
    return row


def _list_remedy(row: list[Any], keys: Sequence[str]) -> str:
    """Say how a list becomes objects, one a line: it may hold them, or values in the order of ``keys``."""
    if not keys or any(isinstance(value, dict) for value in row):
        return _OBJECTS
    names = [json.dumps(key) for key in keys]
    made = f"{names[0]}: .[]" if len(names) == 1 else ", ".join(f"{name}: .[{i}]" for i, name in enumerate(names))
    # A list of lists has several rows.
    rows = ".[] | " if any(isinstance(value, list) for value in row) else ""
    return f"; write one object a line: jq -c {quoted(f'{rows}{{{made}}}')} FILE"
