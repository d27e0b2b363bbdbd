"""Predictions of the rows of a file, which has no labels: in windows that any number of ranks share, kept as they come.

A window is predicted by one rank, as if it were a file of its own, so that a prediction depends neither on the number
of ranks nor on an interruption. Its predictions are a file in ``.NAME.windows`` beside the output; rank 0 joins them.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, DataError, counted
from capt.pretrain.base.files import read_json, replacing, require_own_folder, require_writable, write_json
from capt.pretrain.base.parallel import ProgressCallback, batched
from capt.pretrain.data.formats import writer_of

logger = logging.getLogger(__name__)

WINDOW = 1024
"""Rows that are sorted by length together, and lost at most by a rank that is killed."""
_IDENTITY = "identity.json"

RowT = TypeVar("RowT")


class RowWindow(NamedTuple):
    """The rows of a window as they are written, and how many of them were longer than the model reads."""

    rows: list[dict[str, Any]]
    cut: int


@runtime_checkable
class Predictor(Protocol[RowT]):
    """A model and a file of new rows."""

    @property
    def columns(self) -> Mapping[str, type]:
        """The columns that are written, in order, and what their cells hold (`capt.pretrain.data.formats`)."""
        ...

    @property
    def predicted(self) -> str:
        """The column of the prediction, whose values are counted where they are texts."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return all that decides what is written, as JSON has it: files by their hashes, options."""
        ...

    def rows(self) -> Iterator[RowT]:
        """Yield the rows of the file. Raises ``DataError`` for one that is not what it should be."""
        ...

    def predict(self, rows: Sequence[RowT]) -> RowWindow:
        """Return what is written of some rows, in their order."""
        ...


def predict_file(
    predictor: Predictor[Any], file: Path, out: Path, *, progress: ProgressCallback | None = None
) -> dict[str, Any]:
    """Predict every row of a file, and write ``out`` when all are done. Collective.

    After an interruption the same call continues, on any number of ranks.

    Args:
        predictor: the model and the rows.
        file: that they are read from.
        out: a table of any format that can be written, which has the rows in the order of the file.
        progress: called with the rows done and their number.

    Returns:
        ``out``, ``rows``, ``predicted`` (now, and not before an interruption), ``cut``, and ``counts`` of the classes.

    Raises:
        ConfigError: ``out`` cannot be written.
        DataError: a row of the file is not what it should be; nothing is predicted then.
    """
    world, rank = distributed.world_size(), distributed.rank()
    parts = out.absolute().parent / f".{out.name}.windows"
    with distributed.synchronize_errors(patient=True):
        writer = writer_of(out)
        require_writable(out)
        if out.exists() and out.samefile(file):
            raise ConfigError(f"{out} is read, and would be overwritten: name another file to write")
        require_own_folder(parts)
        # All rows are looked at first: one that cannot be read must not end hours of work.
        total = sum(1 for _ in predictor.rows())
        if rank == 0:
            _prepare(parts, {**predictor.identity(), "window": WINDOW, "columns": list(predictor.columns)})
    done = 0
    with distributed.synchronize_errors(patient=True):
        for number, window in enumerate(batched(predictor.rows(), WINDOW)):
            path = parts / f"{number:08d}.json"
            if number % world != rank or path.exists():
                continue
            write_json(path, predictor.predict(window)._asdict(), private=True)
            done += len(window)
            if progress is not None:
                # The windows of the other ranks are about as far.
                progress(min((number + 1) * WINDOW, total), total)
    predicted, counts, cut = sum(distributed.gather_objects(done)), Counter[str](), 0
    with distributed.synchronize_errors(patient=True):
        if rank == 0:
            files = [parts / f"{number:08d}.json" for number in range(-(-total // WINDOW))]

            def joined() -> Iterator[dict[str, Any]]:
                nonlocal cut
                for path in files:
                    window = RowWindow(**read_json(path, limit=_LARGEST))
                    cut += window.cut
                    if predictor.columns[predictor.predicted] is str:
                        counts.update(row[predictor.predicted] for row in window.rows)
                    yield from window.rows

            with replacing(out) as (target, _):
                writer.write(target, predictor.columns, joined())
            shutil.rmtree(parts)
    if cut:
        logger.warning("%s: %s cut to the length that the model reads", file, counted(cut, "row"))
    return {"out": str(out), "rows": total, "predicted": predicted, "cut": cut, "counts": dict(counts)}


_LARGEST = 1 << 32
"""Bytes of the file of a window at most: its texts may be long."""


def _prepare(parts: Path, identity: dict[str, Any]) -> None:
    """Make the folder of the windows; one of another model, file or option is begun again."""
    path = parts / _IDENTITY
    try:
        before = read_json(path) if path.is_file() else None
    except DataError:
        before = None
    if before == identity:
        if there := sum(1 for _ in parts.glob("[0-9]*.json")):
            logger.info("%s: continues behind %s", parts, counted(there, "window"))
        return
    if parts.exists():
        logger.info("%s: of another model, file or option, and begun again", parts)
        shutil.rmtree(parts)
    write_json(path, identity, private=True)
