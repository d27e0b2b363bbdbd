"""``metrics.jsonl``, an object a line: its typed rows. What reads the file reads it here. Imports no torch.

A row holds ``step``, ``samples`` and ``tokens``, ``split`` unless it is of the training, and figures: numbers, or null
for one that is not finite. The file may come from somebody else, and a crash may have cut its last line: what is no
such row is left out and noted, and a file or line without bounds is not read.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import open_lock, open_regular

METRICS = "metrics.jsonl"
TRAINING, VALIDATION = "train", "validation"

_FILE = 1 << 30
"""Bytes of a file at most: a million rows of a kilobyte."""
LINE = 1 << 20
"""Bytes of a row at most."""
_FIGURES = 2000
_NAME = 200
_LARGEST = 10**100
_STEPS = 1 << 53
_TOKENS = 1 << 63
_COUNTERS = frozenset({"step", "samples", "tokens"})
_SHOWN = 10


@dataclass(frozen=True)
class MetricsRow:
    """Log of a step: ``figures`` by name, without the counters; nan (or inf) is one that is not finite.

    ``tokens`` is how many positions the run had seen by then, 0 where that is not known.
    """

    step: int
    split: str = TRAINING
    figures: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    @property
    def is_validation(self) -> bool:
        """True if a validation logged it."""
        return self.split == VALIDATION


@dataclass(frozen=True)
class Metrics:
    """The rows of a run in the order of their steps; ``notes`` say what was odd in the file."""

    training: list[MetricsRow]
    validation: list[MetricsRow]
    notes: list[str]


def read_metrics(path: Path) -> Metrics:
    """Read a whole file.

    Where steps were done again after a resume, the last row of a step counts, and rows beyond the step that was resumed
    from are dropped.

    Raises:
        DataError: it is not a regular file, or over a GiB. ``OSError`` passes.
    """
    rows: list[MetricsRow] = []
    damaged: list[int] = []
    number = 0
    with open_regular(path) as file:
        for number, line in enumerate(bounded_lines(file, path), start=1):
            row = parse_row(line)
            if row is not None:
                rows.append(row)
            elif line.strip():
                damaged.append(number)
    notes = []
    if damaged == [number] and not line.endswith(b"\n"):
        notes.append(f"the last line of {METRICS} (line {number}) is torn and was left out: killed while writing?")
    elif damaged:
        more = f" and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
        notes.append(f"damaged lines of {METRICS} were left out: {', '.join(map(str, damaged[:_SHOWN]))}{more}")
    training, validation = _last_timeline(rows, notes)
    return Metrics(training, validation, notes)


def parse_row(line: bytes) -> MetricsRow | None:
    """The row of a line; None for what is none: torn, not an object, without a step that counts."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # ValueError: not UTF-8, or a number of thousands of digits, too
        return None
    if not isinstance(values, dict) or len(values) > _FIGURES:
        return None
    step, split = values.get("step"), values.get("split", TRAINING)
    # `True` would be an int to isinstance.
    if type(step) is not int or not 0 <= step < _STEPS or not isinstance(split, str):
        return None
    # One string for a name in a million rows.
    figures = {sys.intern(name): _number(value) for name, value in values.items() if _is_figure(name, value)}
    tokens = values.get("tokens")
    return MetricsRow(step, split, figures, tokens if type(tokens) is int and 0 <= tokens < _TOKENS else 0)


def last_step_in(path: Path) -> int:
    """The step of the last row, 0 without one. Only the end of the file is read. Raises as `drop_rows_after`."""
    with open_regular(path) as file:
        return next((row.step for _, row, _ in _rows_from_end(file, path)), 0)


def drop_rows_after(path: Path, step: int) -> None:
    """Cut off the rows of later steps, which will be done again, and what follows the last kept row and is no row.

    Steps grow from row to row, for every resume does this, so that only the end is read of a file of any size.

    Raises:
        DataError: it is not a regular file, or has no row in a GiB. ``OSError`` passes, but for a file that is not
            there.
    """
    try:
        with open_regular(path) as file:
            kept = next((each for each in _rows_from_end(file, path) if each[1].step <= step), None)
    except FileNotFoundError:
        return
    end, whole = (0, True) if kept is None else (kept[0], kept[2])
    with open_lock(path, error=DataError) as changed:
        changed.truncate(end)
        # A kill may have cut off the end of the last row that is kept.
        if not whole:
            changed.seek(end)
            changed.write("\n")
        changed.flush()
        os.fsync(changed.fileno())


def _rows_from_end(file: BinaryIO, path: Path) -> Iterator[tuple[int, MetricsRow, bool]]:
    """The rows of a file, the last first: where its line ends, the row, and whether the line is whole."""
    below = file.seek(0, os.SEEK_END)
    for begin, line in _lines_from_end(file):
        row = parse_row(line)
        if row is not None:
            below = begin
            yield begin + len(line), row, line.endswith(b"\n")
        elif below - begin > _FILE:
            raise DataError(f"{path}: no row in {_FILE:,} bytes; move it away")


def _lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line with the place where it begins, the last first. One over ``LINE`` bytes comes in pieces."""
    begin, held = file.seek(0, os.SEEK_END), b""
    while begin:
        size = min(LINE, begin)
        begin = file.seek(begin - size)
        held = file.read(size) + held
        first = held.find(b"\n") + 1 or len(held)  # of a line that begins before
        first = first if begin and first <= LINE else 0
        held, lines = held[:first], held[first:]
        place = begin + first + len(lines)
        for line in reversed(io.BytesIO(lines).readlines()):
            place -= len(line)
            yield place, line


def bounded_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines of JSON with their ends. Of a line over ``LINE`` bytes only a piece, which is not JSON.

    Raises:
        DataError: the file has over a GiB.
    """
    if os.fstat(file.fileno()).st_size > _FILE:
        raise DataError(f"{path}: over {_FILE:,} bytes, which is the most that is read of it; move it away")
    while line := file.readline(LINE):
        piece = line
        while len(piece) == LINE and not piece.endswith(b"\n"):
            piece = file.readline(LINE)
            line = b"over-long" + piece[-1:]
        yield line


def _is_figure(name: str, value: Any) -> bool:
    is_number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return is_number and name not in _COUNTERS and len(name.encode(errors="replace")) <= _NAME and name.isprintable()


def _number(value: int | float | None) -> float:
    """Read a figure: null is nan, and a number beyond any real figure is infinite, so that no sum overflows."""
    if value is None:
        return math.nan
    # NaN is neither above nor below a bound.
    return float(value) if -_LARGEST < value < _LARGEST or value != value else math.inf if value > 0 else -math.inf


def _last_timeline(rows: Sequence[MetricsRow], notes: list[str]) -> tuple[list[MetricsRow], list[MetricsRow]]:
    """Training and validation rows; a row takes back those after it and its like of the same step."""
    kept: dict[bool, list[MetricsRow]] = {False: [], True: []}
    taken_back = 0
    for row in rows:
        for is_validation, earlier in kept.items():
            # A row takes the place of its like of the same step; of the other kind it removes later steps alone.
            while earlier and earlier[-1].step >= row.step + (is_validation != row.is_validation):
                earlier.pop()
                taken_back += 1
        kept[row.is_validation].append(row)
    if taken_back:
        notes.append(f"{taken_back} rows were logged again after going back to an earlier step; the later ones count")
    return kept[False], kept[True]
