"""Read labelled texts of one's own: their columns, what the labels are, and the rows that are held out."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from capt.finetune.columns import Columns, cell_in, find_columns, open_labelled, text_in
from capt.finetune.glue.files import Examples
from capt.finetune.labels.config import LabelsData
from capt.finetune.text_task import Kind
from capt.pretrain.base.errors import ConfigError, DataError, counted, shown
from capt.pretrain.base.files import number_in
from capt.pretrain.base.overlap import report_overlap, same_text, shared
from capt.pretrain.data.tables import FileTable

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


@dataclass(frozen=True)
class Splits:
    """The examples that a job trains and validates on; ``data`` is its section with all that was found."""

    data: LabelsData
    train: Examples
    validation: Examples
    digest: str


def read_splits(data: LabelsData) -> Splits:
    """Read the files of a job, find out what the labels are, and hold rows out.

    Raises:
        DataError: a file cannot be read, or a row has no text or no label that fits; the message names file, line and
            what would be right.
        ConfigError: the labels are not of ``data.kind``, or what they are has to be said.
    """
    rows = read_rows(data.train, data)
    # The training rows alone decide what the labels are; the held-out file is read by that.
    data = resolved(data, rows)
    held_out = None if data.validation is None else read_rows(data.validation, data)
    labels = [_parsed(rows, i, data) for i in range(len(rows))]
    if data.kind != "regression":
        _report_contradictions(rows, labels)
    if held_out is None:
        chosen = held_out_rows(rows, labels, data.validation_share, data.split_seed)
        taken = set(chosen)
        train, validation = _chosen(rows, [i for i in range(len(rows)) if i not in taken]), _chosen(rows, chosen)
    else:
        train, validation = rows, held_out
        report_overlap({"text": shared(_texts(train), _texts(validation))})
    if data.kind == "regression":
        # Scale and offset are those of the rows that are trained on.
        scores = np.array([_parsed(train, i, data) for i in range(len(train))], dtype=np.float64)
        if scores.max() == scores.min() and data.scale is None:  # rounding gives equal ones a deviation above 0
            raise DataError(f"{rows.path}: every score is {scores[0]:g}; there is nothing to learn")
        scale = float(scores.std()) if data.scale is None else data.scale
        data = data.model_copy(
            update={"scale": scale, "offset": float(scores.mean()) if data.offset is None else data.offset}
        )
    splits = Splits(data, examples(train, data), examples(validation, data), _digest(rows, held_out))
    _report(splits)
    return splits


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
        found["labels"] = known or _classes(rows, [_parsed(rows, i, data) for i in range(len(rows))], kind)
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


def held_out_rows(rows: Labelled, labels: Sequence[Any], share: float, seed: int) -> list[int]:
    """The rows that are held out: about ``share`` of each class (of each range of scores), chosen by ``seed``.

    Rows with the same texts stay together, so that none is trained on and measured. Every class keeps a text in
    training: one with a single text is not held out.

    Raises:
        DataError: there are too few different texts for both sets.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(rows)):
        key = (rows.first[i],) if rows.second is None else (rows.first[i], rows.second[i])
        groups.setdefault(key, []).append(i)
    if len(groups) < 2:
        raise DataError(f"{rows.path}: {counted(len(groups), 'different text')}; name held-out rows in data.validation")
    members = list(groups.values())
    shuffled = [members[i] for i in np.random.default_rng(seed).permutation(len(members))]
    ordered = sorted(shuffled, key=lambda group: labels[group[0]])  # stable: by chance within a class
    wanted = min(max(1, round(share * len(ordered))), len(ordered) - 1)
    # At equal distances in the order of labels, so that each class gives its share.
    places = (np.arange(wanted) + 0.5) * len(ordered) / wanted
    chosen = set(places.astype(np.int64).tolist())
    if not isinstance(labels[0], float):
        chosen = _with_every_class(rows, [[labels[i] for i in group] for group in ordered], chosen, seed)
    return sorted(i for place in chosen for i in ordered[place])


def _with_every_class(rows: Labelled, labels: Sequence[Sequence[Any]], chosen: set[int], seed: int) -> set[int]:
    """The groups that are held out, so that every class keeps one in training; others are held out in their place.

    Args:
        rows: those that are split.
        labels: of each group of rows.
        chosen: the groups that chance has held out.
        seed: chooses those that take their place.

    Raises:
        DataError: every group is the only one of a class.
    """
    classes = [{name for label in group for name in ([label] if isinstance(label, str) else label)} for group in labels]
    # How many groups each class keeps in training; 0 where all of them are held out.
    staying = Counter({name: 0 for group in classes for name in group})
    staying.update(name for i, group in enumerate(classes) if i not in chosen for name in group)
    held_out = set(chosen)
    for i in sorted(chosen):
        if any(not staying[name] for name in classes[i]):
            held_out.remove(i)
            staying.update(classes[i])
    missing = len(chosen) - len(held_out)
    for i in np.random.default_rng(seed).permutation(len(labels)).tolist() if missing else ():
        if missing and i not in chosen and all(staying[name] > 1 for name in classes[i]):
            held_out.add(i)
            staying.subtract(classes[i])
            missing -= 1
    if not held_out:
        raise DataError(f"{rows.path}: every text is the only one of a label; name held-out rows in data.validation")
    groups = Counter(name for group in classes for name in group)
    if alone := sorted(name for name, count in groups.items() if count == 1):
        logger.warning(
            "%s with one text alone, which is trained on, so that validation has none of it: %s",
            counted(len(alone), "label"), ", ".join(map(repr, alone))[:300],
        )  # fmt: skip
    return held_out


def examples(rows: Labelled, data: LabelsData) -> Examples:
    """Rows with their labels as numbers: classes (int64), scores (float32), or 0 and 1 a label (float32).

    Raises:
        DataError: a label is missing or not one of ``data``.
    """
    parsed: list[Any] = [_parsed(rows, i, data) for i in range(len(rows))]
    labels: np.ndarray
    if data.kind == "regression":
        labels = np.array(parsed, dtype=np.float32)
    else:
        assert data.labels is not None, "resolved fills it in"
        number = {name: i for i, name in enumerate(data.labels)}
        for place, label in zip(rows.places, parsed, strict=True):
            for name in label if isinstance(label, tuple) else (str(label),):
                if name not in number:
                    listed = ", ".join(map(repr, data.labels))[:300]
                    raise DataError(
                        f"{place}: label {shown(name)} is none of {listed}; correct it, or list all in data.labels"
                    )
        if data.kind == "classification":
            labels = np.array([number[str(label)] for label in parsed], dtype=np.int64)
        else:
            labels = np.zeros((len(rows), len(data.labels)), dtype=np.float32)
            for i, label in enumerate(parsed):
                labels[i, [number[name] for name in label]] = 1.0
    return Examples(rows.first, rows.second, labels, list(range(len(rows))), str(rows.path))


def _parsed(rows: Labelled, i: int, data: LabelsData) -> Label:
    """The label of row ``i`` by ``data.kind``."""
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


def _texts(rows: Labelled) -> Iterator[tuple[str, ...]]:
    columns = [rows.first] if rows.second is None else [rows.first, rows.second]
    return (tuple(map(same_text, texts)) for texts in zip(*columns, strict=True))


def _is_missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip()) or (isinstance(cell, float) and cell != cell)


def _list_of(cell: Any) -> list[str] | None:
    """The labels in a list, or in a cell with a JSON list; None for anything else."""
    if isinstance(cell, str) and cell.strip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return None
    if not isinstance(cell, list) or any(_is_missing(each) or isinstance(each, list | dict) for each in cell):
        return None
    return [_name(each) for each in cell]


def _is_vector(cell: Any) -> bool:
    """Return whether a list has a number for each label there is, and not those of the row."""
    if isinstance(cell, str) and cell.strip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return False
    if not isinstance(cell, list) or not all(isinstance(each, int | float) for each in cell):
        return False
    # A fraction is no label, and the labels of a row do not repeat 0 or 1.
    return any(each % 1 for each in cell) or (set(cell) <= {0, 1} and len(set(cell)) < len(cell))


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


def _chosen(rows: Labelled, numbers: Sequence[int]) -> Labelled:
    def take(values: list[_T]) -> list[_T]:
        return [values[i] for i in numbers]

    second = None if rows.second is None else take(rows.second)
    return replace(rows, places=take(rows.places), first=take(rows.first), second=second, cells=take(rows.cells))


def _digest(*parts: Labelled | None) -> str:
    digest = hashlib.sha256()
    for rows in parts:
        content = None if rows is None else [rows.first, rows.second, rows.cells]
        digest.update(json.dumps(content, default=str).encode())
    return digest.hexdigest()[:32]


def _report_contradictions(rows: Labelled, labels: Sequence[Any]) -> None:
    """Warn of texts that have several labels in different rows: no model can have both right."""
    seen: dict[tuple[str, ...], Any] = {}
    places = [
        place
        for text, label, place in zip(_texts(rows), labels, rows.places, strict=True)
        if seen.setdefault(text, label) != label
    ]
    if places:
        logger.warning("rows whose text has another label above: %d, the first is %s", len(places), places[0])


def _report(splits: Splits) -> None:
    """Log what was found, and warn of what a class or a text without training rows makes meaningless."""
    data, train = splits.data, splits.train
    second = "" if data.second is None else f" and {data.second!r}"
    logger.info("%s: text %r%s, label %r", data.train, data.text, second, data.label)
    if data.kind == "regression":
        logger.info("regression: scores of mean %.4g and standard deviation %.4g", data.offset, data.scale)
        return
    assert data.labels is not None, "resolved fills it in"
    assert train.labels is not None, "examples fills it in"
    many = data.kind == "multi_label"
    counts = train.labels.sum(0) if many else np.bincount(train.labels, minlength=len(data.labels))
    listed = ", ".join(f"{name} ({int(count)})" for name, count in zip(data.labels, counts, strict=True))
    logger.info("%s of %d labels: %s", data.kind, len(data.labels), listed[:1000])
    if absent := [name for name, count in zip(data.labels, counts, strict=True) if not count]:
        logger.warning("no row that is trained on has the label %s", ", ".join(map(repr, absent))[:300])
    if many and isinstance(data.label, str) and train.labels.sum(1).max() < 2:
        logger.warning("no row has two labels: is data.label_separator=%r right?", data.label_separator)
