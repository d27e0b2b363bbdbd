"""Read GLUE's tab-separated files as they are distributed, plain or gzipped.

The files know no quoting: a quotation mark is text, and a reader that thinks otherwise merges rows. Lines end at line
feeds alone. Malformed rows of QQP's train and dev files (fewer cells than the header, from line feeds inside questions)
are dropped, as everyone does; a row of a test file never is, because the leaderboard counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from capt.finetune.glue.tasks import Columns, GlueTask
from capt.finetune.order import RowNumbers
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import read_lines
from capt.pretrain.data.sts_files import read_score

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """The rows of a split, in file order.

    ``second`` is None for tasks of single sentences. ``labels`` is None where there are none: int64 classes, float32
    scores, or a float32 column for each of several labels. ``index`` numbers the rows; for a test split it is the
    file's own, which a submission repeats.
    """

    first: list[str]
    second: list[str] | None
    labels: np.ndarray | None
    index: list[int]
    source: str

    def __len__(self) -> int:
        return len(self.first)

    def rows(self, numbers: RowNumbers) -> Examples:
        """The rows with these numbers."""
        second = None if self.second is None else [self.second[i] for i in numbers]
        labels = None if self.labels is None else self.labels[numbers]
        return Examples([self.first[i] for i in numbers], second, labels, [self.index[i] for i in numbers], self.source)


def read_split(folder: Path, task: GlueTask, split: str) -> Examples:
    """Read a split of ``task`` from a GLUE folder (with ``RTE/``, ``CoLA/``, ... in it), or from the task's own folder.

    A number of rows that is not the official one is logged as a warning.

    Raises:
        DataError: the file is missing, empty, not UTF-8 or a torn gzip; a row has another number of columns than the
            header; a label is unknown or a score outside 0 to 5. The text names file and line.
        ConfigError: the task has no such split.
    """
    split = task.split(split)
    path = find_split(folder, task, split)
    lines = enumerate(read_lines([path]), start=1)
    columns = task.columns[split]
    # Columns are found by the header, or by number in a file without one.
    header = None if columns.width else _header(path, lines)
    places = _places(path, columns, header)
    width = columns.width or len(header or ())
    text_places = places[:2]
    cells_of: dict[int, list[str]] = {at: [] for at in places if at is not None}
    numbers: list[int] = []
    dropped: list[int] = []
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) == width:
            numbers.append(number)
            for at, kept in cells_of.items():  # MNLI's parse trees, most of its bytes, are let go
                # Texts stay as they are, letter by letter; a label or an index may have blanks around it.
                kept.append(cells[at] if at in text_places else cells[at].strip())
        elif task.drops_malformed and columns.label is not None:
            dropped.append(number)
        else:
            what = "the header has" if header else f"{task.folder}'s {split} file has"
            raise DataError(f"{path}, line {number}: {len(cells)} columns; {what} {width}")
    if not numbers:
        raise DataError(f"{path}: the file is empty: it holds no row{' under its header' if header else ''}")
    if dropped:
        logger.warning("%s: %d malformed rows were left out (%s)", path, len(dropped), _some_lines(dropped))
    warn_of_row_count(task, split, len(numbers), str(path))
    first, second, label, index = (None if at is None else cells_of[at] for at in places)
    assert first is not None
    labels = None if label is None else _labels(label, numbers, path, task)
    ids = list(range(len(numbers))) if index is None else _index(index, numbers, path)
    return Examples(first, second, labels, ids, str(path))


def find_split(folder: Path, task: GlueTask, split: str) -> Path:
    """The file of a split, ``.tsv`` or ``.tsv.gz``. Raises ``DataError`` with what was looked for and what is there."""
    split = task.split(split)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should hold {task.folder}/{split}.tsv")
    homes = [folder / name for name in (task.folder, *task.aliases.get(split, ()))]
    # The folder may be that of all tasks or of the task itself.
    home = next((place for place in homes if place.is_dir()), folder)
    for stem in (split, *task.aliases.get(split, ())):
        for path in (home / f"{stem}.tsv", home / f"{stem}.tsv.gz"):
            if path.is_file():
                return path
    there = sorted(path.name for path in home.iterdir())
    missing = f"{split}.tsv or {split}.tsv.gz" + (f", nor a folder {task.folder}" if home == folder else "")
    raise DataError(f"{home}: no {missing}; it holds {_some(there[:12]) or 'nothing'}")


def warn_of_row_count(task: GlueTask, split: str, count: int, source: str) -> None:
    """Log a warning where a split has not the official number of rows."""
    official = task.rows[split]
    if count != official:
        difference = f"{abs(count - official):,} {'more' if count > official else 'fewer'}"
        logger.warning(
            "%s: %s %s has %s rows, the official one has %s (%s): numbers on it do not compare with published ones",
            *(source, task.folder, split, f"{count:,}", f"{official:,}", difference),
        )


def _header(path: Path, lines: Iterator[tuple[int, str]]) -> list[str]:
    for _, line in lines:
        return [cell.strip() for cell in line.split("\t")]
    raise DataError(f"{path}: the file is empty; its first line should be the header")


def _places(path: Path, columns: Columns, header: Sequence[str] | None) -> list[int | None]:
    """The column numbers of the first text, the second, the label and the index."""
    wanted = (columns.first, columns.second, columns.label, columns.index)
    if header is None:
        return [None if at is None else int(at) for at in wanted]
    missing = [repr(name) for name in wanted if name is not None and name not in header]
    if missing:
        raise DataError(f"{path}, line 1: no column {', '.join(missing)}; the header has {_some(header[:20])}")
    return [None if name is None else header.index(str(name)) for name in wanted]


def _labels(cells: Sequence[str], numbers: Sequence[int], path: Path, task: GlueTask) -> np.ndarray:
    if task.regression:
        scores = [read_score(cell, path, number) for cell, number in zip(cells, numbers, strict=True)]
        return np.array(scores, dtype=np.float32)
    classes = {label: number for number, label in enumerate(task.labels)}
    for cell, number in zip(cells, numbers, strict=True):
        if cell not in classes:
            raise DataError(f"{path}, line {number}: unknown label {cell[:80]!r}; {task.folder} has {_all(task)}")
    return np.array([classes[cell] for cell in cells], dtype=np.int64)


def _index(cells: Sequence[str], numbers: Sequence[int], path: Path) -> list[int]:
    for cell, number in zip(cells, numbers, strict=True):
        if not (cell.isascii() and cell.isdigit() and len(cell) < 16):
            raise DataError(f"{path}, line {number}: index {cell[:80]!r} is not a whole number")
    return [int(cell) for cell in cells]


def _some(names: Sequence[str]) -> str:
    return ", ".join(name[:40] if name.isprintable() else ascii(name[:40]) for name in names)


def _all(task: GlueTask) -> str:
    return ", ".join(map(repr, task.labels))


def _some_lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return f"line {shown}" if len(numbers) == 1 else f"lines {shown}{', ...' if len(numbers) > 5 else ''}"
