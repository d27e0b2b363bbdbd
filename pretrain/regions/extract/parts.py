"""An extraction in parts, so that an interrupted one continues where it stopped.

A part is the store of some thousand pictures, and a record of what was read for it. Parts lie in a folder beside the
new store, ``.NAME.extract``, until all are there and are put together:

    plan.json              what made the parts: model, preprocessing, options
    part-000000/store/     a region store; missing where no picture of the part could be used
    part-000000/part.json  the files that were read, with their hashes, and what was left out

A part whose files have changed since is made again.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from pretrain.base.atomic import new_folder
from pretrain.base.errors import DataError
from pretrain.base.files import read_json, write_json
from pretrain.base.records import Record, parse_record
from pretrain.regions.manifest import FeatureType
from pretrain.regions.picture import Picture
from pretrain.regions.store import RegionStore
from pretrain.regions.unfinished import unfinished
from pretrain.regions.writer import write_store

logger = logging.getLogger(__name__)

_LIMIT = 64 << 20
"""Bytes of a record at most."""


class Read(NamedTuple):
    """A picture's file that was read."""

    place: str
    name: str
    sha256: str


class _PartRecord(Record):
    files: str
    read: list[Annotated[list[str], Field(min_length=3, max_length=3)]]
    skipped: list[str]


class Part(NamedTuple):
    """What has been extracted from the pictures of a part.

    Attributes:
        store: their regions; None where none could be used.
        read: the files, in the order of the pictures.
        skipped: what was left out.
    """

    store: Path | None
    read: list[Read]
    skipped: list[str]

    def pictures(self) -> Iterator[Picture]:
        """The pictures of the part, in their order. Raises ``DataError`` for a damaged store."""
        if self.store is None:
            return
        store = RegionStore.open(self.store)
        for one in self.read:
            yield store.picture(one.name)


class Parts:
    """The parts of one extraction.

    Args:
        folder: where they are.
        dtype: type of the features.
        features_of: what makes them.
    """

    def __init__(self, folder: Path, dtype: FeatureType, features_of: Mapping[str, Any]) -> None:
        self._folder, self._dtype, self._features_of = folder, dtype, features_of

    def find(self, number: int, files: str) -> Part | None:
        """The part with this number; None where it is not there yet, or was made of other ``files``.

        ``files`` is a digest of the pictures' names, places and states. Raises ``DataError`` for a damaged record.
        """
        folder = self._part(number)
        if not folder.is_dir():
            return None
        place = folder / "part.json"
        record = parse_record(
            _PartRecord, read_json(place, limit=_LIMIT), str(place), f"; remove {self._folder}", error=DataError
        )
        if record.files != files:
            logger.info("%s: pictures have changed since it was made; making it again", folder)
            return None
        read = [Read(*one) for one in record.read]
        return Part(folder / "store" if read else None, read, record.skipped)

    def write(self, number: int, files: str, pictures: Iterable[Picture], read: list[Read], skipped: list[str]) -> Part:
        """Write a part, in the place of an older one; it appears whole.

        ``read`` and ``skipped`` are looked at when all pictures were.
        """
        shutil.rmtree(self._part(number), ignore_errors=True)
        with new_folder(self._part(number)) as folder:
            left = iter(pictures)
            first = next(left, None)
            if first is not None:
                write_store(
                    folder / "store", chain([first], left), feature_dtype=self._dtype, features_of=self._features_of
                )
            write_json(folder / "part.json", {"files": files, "read": read, "skipped": skipped})
        part = self.find(number, files)
        assert part is not None
        return part

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}"


@contextmanager
def parts_beside(
    out: Path, plan: Mapping[str, Any], dtype: FeatureType, features_of: Mapping[str, Any]
) -> Iterator[Parts]:
    """The parts of the new store ``out``, which are kept when the block is interrupted, and removed at its end.

    Parts of another ``plan`` are removed immediately.

    Raises:
        DataError: ``out`` holds something, or another process extracts to it.
    """
    with unfinished(out, "extract") as work:
        if work.is_dir() and not _is_of(work, plan):
            logger.warning("%s: begun with another model or other options; beginning anew", work)
            shutil.rmtree(work)
        work.mkdir(exist_ok=True)
        write_json(work / "plan.json", plan)
        yield Parts(work, dtype, features_of)
        shutil.rmtree(work)


def _is_of(work: Path, plan: Mapping[str, Any]) -> bool:
    try:
        return bool(read_json(work / "plan.json", limit=_LIMIT) == json.loads(json.dumps(plan)))
    except (FileNotFoundError, DataError):
        return False
