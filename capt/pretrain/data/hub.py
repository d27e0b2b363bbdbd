"""A corpus from the Hugging Face hub, or from a folder that ``datasets`` saved."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import datasets

from capt.pretrain.base.errors import DataError, did_you_mean
from capt.pretrain.base.files import printable
from capt.pretrain.base.stores import is_url, look_up
from capt.pretrain.data.corpus import Corpus, Missing, Piece, TextColumn, row_pieces
from capt.pretrain.data.formats import TextFile, suffix_of

log = logging.getLogger(__name__)


class HubCorpus(Corpus):
    """A split of the dataset ``name`` (memory-mapped by ``datasets``, downloaded once); one document per row.

    ``missing``: see ``TextColumn``. Raises ``DataError`` when the dataset, its split or its column cannot be had.
    """

    def __init__(
        self,
        name: str,
        subset: str | None,
        split: str,
        text_column: str,
        document_start: str | None,
        *,
        missing: Missing = "skip",
    ) -> None:
        self._rows = load_split(name, subset, split)
        self._where, self._column, self._missing = f"{name} ({split})", text_column, missing
        self._without_text = 0
        self._start = re.compile(document_start) if document_start else None
        if text_column not in self._rows.column_names:
            hint = did_you_mean(text_column, self._rows.column_names, "it has")
            raise DataError(f"{self._where} has no column {text_column!r} (data.text_column); {hint}")
        self.size = len(self._rows)

    def pieces(self) -> Iterator[Piece]:
        """The rows of the split."""
        return row_pieces(self._texts(), self._start)

    def contents(self) -> list[dict[str, str | int]]:
        """The split and the fingerprint that ``datasets`` gives its content."""
        without = {"rows_without_text": self._without_text} if self._without_text else {}
        return [{"name": self._where, "format": "hub", "rows": self.size, "sha256": self._rows._fingerprint, **without}]

    @property
    def rows_without_text(self) -> int:
        """The rows without text, once they have been read."""
        return self._without_text

    def _texts(self) -> Iterator[str]:
        self.position, column = 0, TextColumn(self._column, self._missing)
        for batch in self._rows.select_columns([self._column]).iter(batch_size=256):
            for value in batch[self._column]:
                self.position += 1
                if (text := column.text(value, f"{self._where}, row {self.position}")) is not None:
                    yield text
        column.report(self._where)
        self._without_text = column.without


def is_saved(folder: Path) -> bool:
    """Return whether ``save_to_disk`` of ``datasets`` has written a folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def load_split(name: str, subset: str | None, split: str, key: str = "data.name") -> datasets.Dataset:
    """Load a split of the dataset ``name``, which the configuration key ``key`` names. Raises ``DataError``."""
    try:
        if is_saved(Path(name)):
            saved = datasets.load_from_disk(name)
            # `save_to_disk` writes one split, or a folder of splits.
            splits = {"train": saved} if isinstance(saved, datasets.Dataset) else saved
            if split not in splits:
                raise DataError(f"{key}: {name} has no split {split!r}; it has {', '.join(splits)}")
            return splits[split]
        return datasets.load_dataset(name, subset or _first_subset(name), split=split)
    except DataError:
        raise
    except _NOT_LOADED as error:
        raise _cannot_load(key, name, split, error) from error


_NOT_LOADED = (OSError, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError)
"""Errors of ``datasets`` for a data set that is not there or damaged."""


def _cannot_load(key: str, name: str, split: str, error: BaseException) -> DataError:
    cause = error.__cause__ or error  # what could not be read lies behind a DatasetGenerationError
    what = printable(str(cause)) or "nothing is said"
    return DataError(f"{key}: cannot load {name} (split {split}): {type(cause).__name__}: {what}")


def _first_subset(name: str) -> str | None:
    subsets = datasets.get_dataset_config_names(name)
    if len(subsets) > 1:
        log.warning("%s has the subsets %s: using %s (data.subset chooses)", name, ", ".join(subsets), subsets[0])
        return str(subsets[0])
    return None


def split_files(name: str, subset: str | None, split: str) -> list[TextFile] | None:
    """Find the files of a split of the dataset ``name``, which are read where they lie, without a download.

    None where they are not parquet or JSON lines, were saved by ``datasets``, or ``split`` is a slice. Raises
    ``DataError`` as `load_split`.
    """
    if is_saved(Path(name)):
        return None
    try:
        builder = datasets.load_dataset_builder(name, subset or _first_subset(name))
    except _NOT_LOADED as error:
        raise _cannot_load("data.name", name, split, error) from error
    found = builder.config.data_files
    if not found or split not in found:  # it may be a slice
        return None
    paths = [str(path) for path in found[split]]
    if not all(suffix_of(Path(path)) in (".parquet", ".jsonl") for path in paths):
        return None
    return [look_up(path) if is_url(path) else Path(path) for path in paths]
