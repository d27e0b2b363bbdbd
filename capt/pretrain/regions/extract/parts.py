"""An extraction in parts, so that an interrupted one continues where it stopped.

A part is the store of some thousand pictures, and a record of what was read for it. Parts are in a folder beside the
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
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.files import read_json, write_json
from capt.pretrain.base.records import Record, parse_record
from capt.pretrain.regions.manifest import FeatureType
from capt.pretrain.regions.picture import Picture
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.writer import unfinished, write_store

# What a user chooses about an extraction, and what of it decides the features. No torch.


_KNOWN = {
    "backend": ("grid", "vit", "detr"),
    "fit": ("whole", "crop"),
    "precision": ("fp32", "bf16"),
    "dtype": ("fp16", "fp32"),
    "names": ("stem", "path"),
}
"""The values of an option that has a few."""

MOST_PIXELS = 89_478_485
"""Pixels that a picture may have unless the user says otherwise: where Pillow suspects a decompression bomb."""

PILLOW_LIMIT = 2 * MOST_PIXELS
"""Pixels above which Pillow refuses a picture itself."""


@dataclass(frozen=True)
class ExtractOptions:
    """Choices of an extraction. Raises ``ConfigError`` for values that are not possible.

    Attributes:
        backend: ``grid``, ``vit`` or ``detr``.
        model: a Hugging Face folder, or a hub id.
        grid: regions are the cells of a grid of this many rows and columns; None = one region for each patch (``vit``).
        fit: ``whole`` resizes the whole picture to the model's input; ``crop`` follows the folder's own preprocessing,
            which loses what is outside a square in the middle. Detectors always see the whole picture.
        threshold: a detector's regions have at least this confidence; its most confident one is always kept.
        most: regions that are kept of a detector's at most, the most confident.
        device: ``cpu``, ``cuda``, or ``auto`` = CUDA where there is a GPU.
        precision: in which the model computes.
        batch: pictures in one forward pass.
        dtype: in which features are stored.
        names: ``stem`` = a picture is called by its file's name without the ending; ``path`` = with the folders below
            the given one.
        skip_damaged: leave out pictures that cannot be read, and say which, instead of stopping.
        most_pixels: a picture with more is refused before it is decoded.
    """

    backend: str
    model: Path
    grid: int | None = None
    fit: str = "whole"
    threshold: float = 0.2
    most: int = 36
    device: str = "auto"
    precision: str = "fp32"
    batch: int = 8
    dtype: str = "fp16"
    names: str = "stem"
    skip_damaged: bool = False
    most_pixels: int = MOST_PIXELS

    def __post_init__(self) -> None:
        for key, values in _KNOWN.items():
            if getattr(self, key) not in values:
                raise ConfigError(f"--{key} is {' or '.join(values)}, got {getattr(self, key)!r}")
        if self.backend == "detr" and (self.grid is not None or self.fit != "whole"):
            raise ConfigError("--grid and --fit belong to the backends grid and vit; a detector finds its own boxes")
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"--threshold is a confidence from 0 to below 1, got {self.threshold}")
        for key, most in {"batch": 4096, "most": 10_000, "most_pixels": PILLOW_LIMIT, "grid": 1000}.items():
            value = getattr(self, key)
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"--{key.replace('_', '-')} is a number from 1 to {most:,}, got {value}")

    @property
    def cells(self) -> int | None:
        """Rows and columns of the grid: 6 for ``grid`` unless given; None = the patches themselves."""
        return 6 if self.grid is None and self.backend == "grid" else self.grid

    @property
    def of_features(self) -> dict[str, Any]:
        """The choices that change what a region's features are, or which regions there are."""
        if self.backend == "detr":
            return {"threshold": self.threshold, "most": self.most, "precision": self.precision}
        return {"grid": self.cells, "fit": self.fit, "precision": self.precision}


logger = logging.getLogger(__name__)

_LIMIT = 64 << 20
"""Bytes of a record at most."""


class Read(NamedTuple):
    """A picture read from its file."""

    place: str
    name: str
    sha256: str


class _PartRecord(Record):
    files: str
    read: list[Annotated[list[str], Field(min_length=3, max_length=3)]]
    skipped: list[str]


class ExtractedPart(NamedTuple):
    """The regions that were extracted from the pictures of a part.

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

    def find(self, number: int, files: str) -> ExtractedPart | None:
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
        return ExtractedPart(folder / "store" if read else None, read, record.skipped)

    def write(
        self, number: int, files: str, pictures: Iterable[Picture], read: list[Read], skipped: list[str]
    ) -> ExtractedPart:
        """Write a part, in the place of an older one; it appears whole.

        ``read`` and ``skipped`` are looked at when all pictures were.
        """
        shutil.rmtree(self._part(number), ignore_errors=True)
        with new_folder(self._part(number)) as folder:
            # A store needs a picture; of a part whose pictures are all damaged only the record is kept.
            left = iter(pictures)
            first = next(left, None)
            if first is not None:
                write_store(
                    folder / "store", chain([first], left), feature_dtype=self._dtype, features_of=self._features_of
                )
            # `read` and `skipped` are filled while pictures are written, so they come after them.
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
        # Only after the block: what is interrupted keeps its parts.
        shutil.rmtree(work)


def _is_of(work: Path, plan: Mapping[str, Any]) -> bool:
    try:
        return bool(read_json(work / "plan.json", limit=_LIMIT) == json.loads(json.dumps(plan)))
    except (FileNotFoundError, DataError):
        return False
