"""Conditions on the columns of a table: which of its rows are read. No torch.

As ``drop == false and duplicate is null``. The grammar is a small part of Python's, whose own parser reads it: a
column compared with a literal, or looked for in a list of them, joined by ``and``, ``or``, ``not`` and brackets.
Nothing is run as Python. As in SQL a comparison with a null is neither true nor false, and a row is read where the
whole condition is true.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from capt.pretrain.base.errors import ConfigError, DataError, did_you_mean, shown
from capt.pretrain.base.files import number_in
from capt.pretrain.data.formats import Choose, TableRow

_EXAMPLE = "as: drop == false and duplicate is null and lang in ['en', 'de']"
_LONGEST = 2000
"""Characters of a condition: Python's parser is recursive."""
_CONSTANTS = {"true": True, "false": False, "null": None}
_ORDERS: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
_MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}

Truth = bool | None
"""True, false, or neither: a null was compared."""
Test = Callable[[TableRow, bool], Truth]
"""Judges a row; the flag says that cells have types."""


class RowFilter:
    """A condition on the rows of a table.

    Args:
        text: the condition.

    Raises:
        ConfigError: it is none of this grammar.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._columns: dict[str, None] = {}
        if len(text) > _LONGEST:
            raise ConfigError(f"where: a condition of {len(text):,} characters; {_LONGEST:,} are allowed")
        try:
            parsed = ast.parse(text.strip(), mode="eval").body
            self._test = self._compiled(parsed)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, ConfigError):
                raise
            what = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ConfigError(f"where: {shown(text)} is no condition ({what}); write one {_EXAMPLE}") from None

    @property
    def columns(self) -> list[str]:
        """The columns that the condition names."""
        return list(self._columns)

    def matches(self, row: TableRow, *, typed: bool) -> Truth:
        """Return whether the condition is true of a row; None where a null leaves it open.

        Without types (``typed`` false, as in .csv) a cell is read as the literal that it is compared with: an empty one
        is null. Raises ``DataError`` for a cell of another type.
        """
        return self._test(row, typed)

    def choosing(self, path: object, choose: Choose) -> Choose:
        """Return ``choose`` with the columns of the condition added, for files that name columns before their rows."""

        def both(names: list[str]) -> list[str]:
            self.require(path, names)
            chosen = set(choose(names)) | self._columns.keys()
            return [name for name in names if name in chosen]

        return both

    def require(self, path: object, names: Sequence[str]) -> None:
        """Raise ``DataError`` for a column of the condition that a table does not have."""
        if missing := [name for name in self._columns if name not in set(names)]:
            raise DataError(
                f"{path}: where names the column {shown(missing[0])}, which no row has; "
                f"{did_you_mean(missing[0], list(names), 'the columns are')}"
            )

    # ---- the condition as functions of a row

    def _compiled(self, node: ast.expr) -> Test:
        if isinstance(node, ast.BoolOp):
            return _joined([self._compiled(value) for value in node.values], all_of=isinstance(node.op, ast.And))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _negated(self._compiled(node.operand))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            pairs = zip(sides, node.ops, sides[1:], strict=False)
            return _joined([self._compared(*each) for each in pairs], all_of=True)
        # A column alone is a flag.
        if isinstance(node, ast.Name) and node.id.lower() not in _CONSTANTS:
            return self._ordered(node.id, ast.Eq, True)
        raise self._refused(node)

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Test:
        if isinstance(op, ast.Is | ast.IsNot):
            if not isinstance(left, ast.Name) or self._literal(right) is not None:
                raise ConfigError(f"where: `is` takes a column and null, == any value; write one {_EXAMPLE}")
            return self._null(left.id, wanted=isinstance(op, ast.Is))
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(left, ast.Name) or not isinstance(right, ast.List | ast.Tuple) or not right.elts:
                raise ConfigError(f"where: `in` looks for a column in a list of values; write one {_EXAMPLE}")
            among = [self._ordered(left.id, ast.Eq, self._literal(each)) for each in right.elts]
            found = _joined(among, all_of=False)
            return found if isinstance(op, ast.In) else _negated(found)
        kind = type(op)
        if not _is_column(left):
            left, right, kind = right, left, _MIRRORED[kind]
        if not isinstance(left, ast.Name) or not _is_column(left) or _is_column(right):
            raise ConfigError(f"where: a column is compared with a value; write one {_EXAMPLE}")
        return self._ordered(left.id, kind, self._literal(right))

    def _ordered(self, column: str, kind: type[ast.cmpop], literal: Any) -> Test:
        name, compare = _ORDERS[kind]
        if literal is None:
            raise ConfigError(f"where: {column} {name} null is never true; write {column} is null, or is not null")
        if isinstance(literal, bool) and name not in ("==", "!="):
            raise ConfigError(f"where: {column} {name} {str(literal).lower()}: true and false have no order")
        self._columns[column] = None

        def test(row: TableRow, typed: bool) -> Truth:
            cell = _cell(row.cells, column)
            if cell is None:
                return None
            value = _like(cell, literal, typed=typed)
            if value is None:
                raise DataError(
                    f"{row.place}: {column!r} is {shown(cell, 40)} ({type(cell).__name__}), and where compares it with "
                    f"{_KINDS[type(literal)]}, {shown(literal, 40)}: name a value of its own kind"
                )
            return None if value is _EMPTY else compare(value, literal)

        return test

    def _null(self, column: str, *, wanted: bool) -> Test:
        self._columns[column] = None

        def test(row: TableRow, typed: bool) -> Truth:
            cell = _cell(row.cells, column)
            return (cell is None or (not typed and cell == "")) == wanted

        return test

    def _literal(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id.lower() in _CONSTANTS:
            return _CONSTANTS[node.id.lower()]
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
        if isinstance(node, ast.Constant):
            value = node.value
            if value is None or isinstance(value, bool | str):
                if sign == 1:
                    return value
            elif isinstance(value, int | float):
                return sign * value
        raise self._refused(node)

    def _refused(self, node: ast.expr) -> ConfigError:
        part = ast.get_source_segment(self.text.strip(), node) or self.text
        return ConfigError(f"where: {shown(part, 60)} is not part of a condition; write one {_EXAMPLE}")


_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text"}
_EMPTY = object()
"""An empty cell of a file without types, or NaN, beside a literal that is no text."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")


def _is_column(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.lower() not in _CONSTANTS


def _cell(cells: Mapping[str, Any], column: str) -> Any:
    """Return a cell; None for null, for NaN as pandas writes a missing value, and where the row has no such key."""
    value = cells.get(column)
    return None if value != value else value


def _like(cell: Any, literal: Any, *, typed: bool) -> Any:
    """Return a cell as a value of the kind of a literal; None where it is of another kind."""
    if isinstance(cell, str) and not typed:
        if cell == "":
            return _EMPTY
        if isinstance(literal, bool):
            return {"true": True, "false": False}.get(cell.strip().lower())
        return cell if isinstance(literal, str) else _number(cell)
    if isinstance(cell, bool) or isinstance(literal, bool):
        return cell if isinstance(cell, bool) and isinstance(literal, bool) else None
    if isinstance(cell, str) or isinstance(literal, str):
        return cell if isinstance(cell, str) and isinstance(literal, str) else None
    return cell if isinstance(cell, int | float | Decimal) else None


def _number(cell: str) -> Any:
    """Return the number in a cell: a whole one to its last digit, as files with types have it, and NaN as empty."""
    number = number_in(cell)
    if number is None:
        return None
    if number != number:
        return _EMPTY
    return int(cell) if _WHOLE.fullmatch(cell.strip()) else number


def _joined(tests: Sequence[Test], *, all_of: bool) -> Test:
    """Join tests by ``and`` (``all_of``) or ``or``; the first that decides is the last that is asked."""

    def test(row: TableRow, typed: bool) -> Truth:
        found: Truth = all_of
        for each in tests:
            truth = each(row, typed)
            if truth is (not all_of):
                return truth
            found = None if truth is None else found
        return found

    return tests[0] if len(tests) == 1 else test


def _negated(inner: Test) -> Test:
    def test(row: TableRow, typed: bool) -> Truth:
        truth = inner(row, typed)
        return None if truth is None else not truth

    return test


Tally = Callable[[str, str], None]
"""Takes the name of a count, and the place of a row that is left out."""


def kept_rows(
    where: RowFilter | None, path: object, rows: Iterator[TableRow], *, typed: bool, left_out: Tally
) -> Iterator[TableRow]:
    """Yield the rows of which ``where`` is true; ``left_out`` is called for each other one.

    Raises:
        DataError: a cell is of another type than what it is compared with, or no row has a column of the condition.
    """
    if where is None:
        yield from rows
        return
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row.cells)
        truth = where.matches(row, typed=typed)
        if truth:
            yield row
        else:
            left_out("filtered" if truth is False else "null_compared", row.place)
    # Rows of JSON may lack a key that others have, so that only the last of them shows that none has it.
    if names:
        where.require(path, list(names))
