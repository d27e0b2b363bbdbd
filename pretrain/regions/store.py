"""The region store: region features of many pictures in memory-mapped files that all processes of a host share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64
from pydantic import Field

from pretrain.base.errors import DataError, counted
from pretrain.base.records import Count, Record, read_record

MANIFEST = "manifest.json"

Rows = Int64[np.ndarray, " n"]


class StoreFile(Record):
    """A file of the store: its length in bytes and its SHA-256."""

    bytes: Count
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Source(Record):
    """A file or folder that pictures were read from."""

    name: Annotated[str, Field(max_length=4096)]
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    pictures: Count


class StoreManifest(Record):
    """``manifest.json`` of a store.

    Attributes:
        format: the layout's version.
        pictures: how many there are.
        regions: how many all pictures have together.
        most_regions: how many the picture with the most has.
        feature_size: columns of the features.
        feature_dtype: type in which features are stored.
        object_classes: one more than the largest object class; 0 without object labels.
        attribute_classes: the same for attributes.
        features_of: what made the features: ``backend`` and whatever decides its output (weights' hash, preprocessing).
            Stores whose ``features_of`` differ are never mixed.
        sources: what was imported.
        files: by name.
    """

    format: Literal[1] = 1
    pictures: Count
    regions: Count
    most_regions: Count
    feature_size: Annotated[int, Field(gt=0, le=1 << 20)]
    feature_dtype: Literal["fp16", "fp32"]
    object_classes: Count
    attribute_classes: Count
    features_of: dict[str, Any]
    sources: list[Source]
    files: dict[str, StoreFile]

    @property
    def key(self) -> str:
        """A digest of the content: equal for stores that hold the same."""
        files = {name: file.sha256 for name, file in sorted(self.files.items())}
        return sha256(json.dumps([self.features_of, files], sort_keys=True).encode()).hexdigest()


class Regions(NamedTuple):
    """The regions of ``n`` pictures, filled up to the picture with the most of them (``R``).

    Attributes:
        features: zeros where there is no region.
        boxes: left, top, right and bottom edge divided by the picture's width and height.
        present: True where there is a region.
        object_ids: 0 where there is no region; None in a store without object labels.
        object_scores: 0 where there is no region.
        attribute_ids: as for objects.
        attribute_scores: as for objects.
    """

    features: Float[np.ndarray, "n R size"]
    boxes: Float32[np.ndarray, "n R 4"]
    present: Bool[np.ndarray, "n R"]
    object_ids: Int64[np.ndarray, "n R"] | None
    object_scores: Float32[np.ndarray, "n R"] | None
    attribute_ids: Int64[np.ndarray, "n R"] | None
    attribute_scores: Float32[np.ndarray, "n R"] | None


class RegionStore:
    """A store that is open for reading. Files are mapped, so that opening costs nothing and processes share memory.

    Picture ``i`` has the regions ``offsets[i]`` to ``offsets[i + 1] - 1`` of all arrays of regions. Names of pictures
    are sorted, so that one is found without a table in memory.
    """

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._offsets = self._array("offsets")  # int64 [N + 1]
        self._sizes = self._array("sizes")  # int32 [N, 2]: width, height
        self._names = self._array("names")  # bytes [N], UTF-8, sorted
        self._name_rows = self._array("name_rows")  # int64 [N]: the picture that names[i] names
        self._features = self._array("features")  # fp16 or fp32 [regions, size]
        self._boxes = self._array("boxes")  # fp32 [regions, 4], pixels
        self._objects = self._labels("object", manifest.object_classes)
        self._attributes = self._labels("attribute", manifest.attribute_classes)

    @classmethod
    def open(cls, folder: Path) -> RegionStore:
        """Open the store in ``folder``. Raises ``DataError`` where there is none or it does not fit its manifest."""
        try:
            manifest = read_record(StoreManifest, folder / MANIFEST, error=DataError)
        except FileNotFoundError:
            raise DataError(f"{folder}: no region store (no {MANIFEST}); capt regions import makes one") from None
        return cls(folder, manifest)

    def __len__(self) -> int:
        return self.manifest.pictures

    def find(self, names: Sequence[str]) -> Rows:
        """The row of each picture, -1 for one that the store does not hold."""
        wanted = np.array([name.encode() for name in names], dtype=bytes) if names else np.empty(0, dtype="S1")
        places = np.minimum(np.searchsorted(self._names, wanted), max(len(self) - 1, 0))
        if not len(self):
            return np.full(len(names), -1, dtype=np.int64)
        rows: Rows = np.where(self._names[places] == wanted, self._name_rows[places], -1)
        return rows

    def rows(self, names: Sequence[str], source: str = "data") -> Rows:
        """The row of each picture. Raises ``DataError`` that counts and names the first of those that are absent."""
        rows = self.find(names)
        if (rows < 0).any():
            absent = list(dict.fromkeys(name for name, row in zip(names, rows, strict=True) if row < 0))
            raise DataError(
                f"{source}: {counted(len(absent), 'picture')} not in the region store {self.folder}: "
                f"{', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''}; import their regions into the store"
            )
        return rows

    def counts(self, rows: Rows) -> Rows:
        """How many regions each picture has."""
        counts: Rows = self._offsets[rows + 1] - self._offsets[rows]
        return counts

    def regions(self, rows: Rows, most: int | None = None) -> Regions:
        """The regions of the pictures ``rows``, filled up to ``most`` (None = as many as one of them has)."""
        counts, starts = self.counts(rows), self._offsets[rows]
        most = int(counts.max(initial=1)) if most is None else most
        columns = np.arange(most)
        present = columns < counts[:, None]
        where = (starts[:, None] + columns)[present]
        sizes = np.repeat(self._sizes[rows].astype(np.float32), counts, axis=0)

        def filled(values: np.ndarray) -> Any:
            out = np.zeros((len(rows), most, *values.shape[1:]), dtype=values.dtype)
            out[present] = values
            return out

        objects, attributes = (
            [None, None] if labels is None else [filled(labels[0][where].astype(np.int64)), filled(labels[1][where])]
            for labels in (self._objects, self._attributes)
        )
        boxes = self._boxes[where] / np.concatenate([sizes, sizes], axis=1)
        return Regions(filled(self._features[where]), filled(boxes), present, *objects, *attributes)

    def features_at(self, places: Int64[np.ndarray, " k"]) -> Float[np.ndarray, "k size"]:
        """The features of regions by their number among all regions of the store."""
        taken: np.ndarray = self._features[places]
        return taken

    def _labels(self, what: str, classes: int) -> tuple[np.ndarray, np.ndarray] | None:
        return (self._array(f"{what}_ids"), self._array(f"{what}_scores")) if classes else None

    def _array(self, name: str) -> np.ndarray:
        mapped: np.ndarray = np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return mapped
