"""Kinds of labels, found in the training rows: classes, scores, or several labels a row; each label by its kind."""

from __future__ import annotations

import json
import logging
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from capt.finetune.labels.config import LabelsData
from capt.finetune.labels.rows import Labelled
from capt.finetune.text_task import Kind
from capt.pretrain.base.errors import ConfigError, DataError, counted, shown
from capt.pretrain.base.files import number_in
from capt.pretrain.base.overlap import same_text

logger = logging.getLogger(__name__)

_LARGEST = 1e18
"""The largest score: fp32 holds its square."""
_LIST = re.compile(r"\[\s*(['\"].*)?\]", re.DOTALL)
"""A list as Python writes it."""
_VECTOR = "Of a vector of 0 and 1 make a column for each label: data.label=[NAME,NAME]"
_COMMA = re.compile(r"[+-]?\d+(,\d+)+")
_NO_LABEL = ("nan", "<na>", "#n/a", "#ref!", "#div/0!", "#value!", "#name?", "#num!", "#null!")
"""Words that programs write for a missing cell or one without a value. None, NA and null may be classes."""
_UNLABELLED = ("-1", "-")
"""Marks of a row on which people did not agree, in sets of the hub and SNLI's files. Both may be names of classes."""
_MANY_CLASSES = 20
"""More different whole numbers than that may be classes or scores: the user has to say which."""

Label = str | float | tuple[str, ...]
"""A class, a score, or the labels of a row."""


def resolved(data: LabelsData, rows: Labelled) -> LabelsData:
    """``data`` with its columns, the kind of the labels and the classes, as the training rows have them.

    Raises:
        DataError: the labels are all the same, or all different.
        ConfigError: it cannot be told whether they are classes or scores.
    """
    columns = rows.columns
    several = isinstance(data.label, list)
    found: dict[str, Any] = {"text": columns.text, "second": columns.second}
    found["label"] = list(columns.labels) if several else columns.labels[0]
    found["kind"] = kind = data.kind or _kind(rows, data)
    if kind != "regression":
        known = data.labels or (list(columns.labels) if several else None)
        data = data.model_copy(update=found)
        found["labels"] = known or _classes(rows, [parsed_label(rows, i, data) for i in range(len(rows))], kind)
    return data.model_copy(update=found)


def _kind(rows: Labelled, data: LabelsData) -> Kind:
    cells = [cell for cell in rows.cells if not _is_missing(cell)]
    if rows.classes:
        return "multi_label" if any(isinstance(cell, list) for cell in cells) else "classification"
    if isinstance(data.label, list) or (cells and all(_list_of(cell) is not None for cell in cells)):
        return "multi_label"
    if data.labels is not None:
        return "classification"
    numbers = [number for cell in cells if (number := _number(cell)) is not None]
    if cells and all(isinstance(cell, str) and _COMMA.fullmatch(cell.strip()) for cell in cells):
        raise DataError(
            f"{rows.path}: the labels are numbers with a comma, as {shown(cells[0])}; write 3.5 for 3,5 and 1000 for "
            "1,000, or say what they are: data.kind=multi_label or classification"
        )
    # Numbers are no more than half of the labels: classes.
    if 2 * len(numbers) <= len(cells):
        return "classification"
    if len(numbers) < len(cells):
        odd = next(i for i, cell in enumerate(rows.cells) if not _is_missing(cell) and _number(cell) is None)
        raise DataError(
            f"{rows.places[odd]}: label {shown(rows.cells[odd])} is not a number, as most labels are; correct or "
            "remove the row, or set data.kind=classification"
        )
    # A fraction makes scores; a few whole numbers are classes; many could be either.
    if any(not number.is_integer() for number in numbers):
        return "regression"
    if len(set(numbers)) > _MANY_CLASSES:
        raise ConfigError(
            f"data.kind: {rows.path} has {len(set(numbers))} different whole numbers as labels; say whether they are "
            "scores (data.kind=regression) or classes (data.kind=classification)"
        )
    return "classification"


def _classes(rows: Labelled, labels: Sequence[Any], kind: Kind) -> list[str]:
    counts = Counter(name for label in labels for name in ([label] if kind == "classification" else label))
    if kind == "classification" and len(counts) == 1:
        raise DataError(f"{rows.path}: every label is {shown(labels[0])}; there is nothing to learn from one class")
    if kind == "classification" and len(counts) == len(rows):
        raise DataError(
            f"{rows.path}: each of its {len(rows)} rows has a label of its own ({shown(labels[0])}, ...); "
            f"is {rows.columns.labels[0]!r} the column of the labels? data.label=NAME names it, data.kind=regression "
            "trains on numbers"
        )
    if not counts:
        raise DataError(f"{rows.path}: no row has a label; there is nothing to learn")
    if kind == "multi_label" and len(rows) > 1 and len(set(labels)) == 1:
        raise DataError(
            f"{rows.path}: every row has the labels {shown(', '.join(labels[0]))}; there is nothing to learn. {_VECTOR}"
        )
    if rows.classes:
        return list(rows.classes)
    for name in _UNLABELLED:
        if kind == "classification" and 0 < 10 * counts[name] * len(counts) < len(rows):
            logger.warning(
                "%s: %s is read as a class, and is rare (%s, the first is %s); sets such as SNLI mark rows without a "
                "label so: remove these if they are",
                rows.path, shown(name), counted(counts[name], "row"), rows.places[labels.index(name)],
            )  # fmt: skip
    # Two spellings of one class (true and 1, 1 and 1.0, other letter case) would be trained as two.
    spellings: dict[str, str] = {}
    for name in counts:
        number = _number({"true": 1, "false": 0}.get(name.lower(), name))
        seen = "".join(c for c in name if unicodedata.category(c) != "Cf")  # zero-width characters, soft hyphens
        same = same_text(seen) if number is None else str(number)
        if (other := spellings.setdefault(same, name)) != name:
            at = next(i for i, label in enumerate(labels) if label == name or (kind == "multi_label" and name in label))
            raise DataError(
                f"{rows.places[at]}: label {shown(name)} reads as {shown(other)} above, one class written in two ways; "
                "write it in one, or list all classes in data.labels"
            )
    # Numbers in the order of their values: 2 before 10.
    if all(_number(name) is not None for name in counts):
        return sorted(counts, key=lambda name: (_number(name) or 0.0, name))
    return sorted(counts)


def parsed_label(rows: Labelled, i: int, data: LabelsData) -> Label:
    """Return the label of row ``i`` by ``data.kind``. Raises ``DataError`` where it is none."""
    cell, place, column = rows.cells[i], rows.places[i], rows.columns.labels[0]
    # Several columns, each with a label of its own, whose cells are 0 or 1.
    if isinstance(cell, tuple):
        return tuple(name for name, each in zip(rows.columns.labels, cell, strict=True) if _flag(each, name, place))
    # An empty list is a row without labels, and a missing cell a row that nobody has labelled.
    if data.kind == "multi_label":
        names = _list_of(cell)
        if _is_vector(cell):
            raise DataError(f"{place}: {column!r} is {shown(cell)}, numbers and no names of labels. {_VECTOR}")
        if names is None and isinstance(cell, str) and _LIST.fullmatch(cell.strip()):
            raise DataError(f'{place}: {column!r} is {shown(cell)}, no JSON list; write it as ["a", "b"]')
        if names is None and isinstance(cell, str):
            names = [name.strip() for name in cell.split(data.label_separator) if name.strip()]
        if names is None:
            if not _is_missing(cell):
                raise DataError(f"{place}: {column!r} is {shown(cell)}; it must be a list of labels")
            raise DataError(f"{place}: {column!r} is missing; a row without labels has an empty list")
        for name in names:
            _require_label(name, place, column, data, is_known=bool(rows.classes))
        return tuple(sorted(dict.fromkeys(names)))
    if _is_missing(cell):
        raise DataError(f"{place}: no label ({column!r} is empty); add it or remove the row")
    if data.kind == "regression":
        number = _number(cell)
        if number is None:
            raise DataError(
                f"{place}: {column!r} is {shown(cell)}; a score must be a finite number; correct it, or remove the row"
            )
        if abs(number) > _LARGEST:
            raise DataError(
                f"{place}: {column!r} is {shown(cell)}; a score is between -1e18 and 1e18; divide all scores"
            )
        return number
    if isinstance(cell, list | dict | bytes):
        raise DataError(f"{place}: {column!r} is {shown(cell)}; a class is a text or a whole number")
    name = _name(cell)
    if data.labels is None and not rows.classes and _LIST.fullmatch(name):
        raise DataError(f'{place}: {column!r} is {shown(cell)}, a list as text; write it as JSON: ["a", "b"]')
    _require_label(name, place, column, data, is_known=bool(rows.classes))
    return name


def _require_label(name: str, place: str, column: str, data: LabelsData, *, is_known: bool) -> None:
    if data.labels is None and not is_known and name.lower() in _NO_LABEL:
        raise DataError(
            f"{place}: {column!r} is {shown(name)}, as a missing label is written; remove the row, or list it in "
            "data.labels if it is a class"
        )


def _is_missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip()) or (isinstance(cell, float) and cell != cell)


def _items(cell: Any) -> list[Any] | None:
    """The items of a list, or of a cell with a JSON list; None for anything else."""
    if isinstance(cell, str) and cell.strip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return None
    return cell if isinstance(cell, list) else None


def _list_of(cell: Any) -> list[str] | None:
    """The labels in a list; None for anything else."""
    items = _items(cell)
    if items is None or any(_is_missing(each) or isinstance(each, list | dict) for each in items):
        return None
    return [_name(each) for each in items]


def _is_vector(cell: Any) -> bool:
    """Return whether a list has a number for each label there is, and not those of the row."""
    items = _items(cell)
    if items is None or not all(isinstance(each, int | float) for each in items):
        return False
    # A fraction is no label, and the labels of a row do not repeat 0 or 1.
    return any(each % 1 for each in items) or (set(items) <= {0, 1} and len(set(items)) < len(items))


def _number(cell: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(cell, bool):
        return None
    try:
        value = number_in(cell) if isinstance(cell, str) else float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if value is not None and math.isfinite(value) else None


def _name(cell: Any) -> str:
    """A class as text: 1 and 1.0 (which numbers become beside missing ones) are one class, true is ``true``."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float | Decimal) and math.isfinite(cell) and cell == int(cell):
        return str(int(cell))
    return str(cell).strip()


def _flag(cell: Any, column: str, place: str) -> bool:
    value = {"0": False, "0.0": False, "1": True, "1.0": True, "false": False, "true": True}.get(_name(cell).lower())
    if value is None:
        raise DataError(f"{place}: {column!r} is {shown(cell)}; a column of a label holds 0 or 1")
    return value
