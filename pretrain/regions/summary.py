"""The numbers of a region store and of one of its pictures that ``capt regions inspect`` shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.base.errors import DataError, counted
from pretrain.base.text_lines import read_lines
from pretrain.regions import nlvr1
from pretrain.regions.store import RegionStore

_TOGETHER = 1 << 20


@dataclass(frozen=True)
class StoreSummary:
    """What a store holds.

    ``histogram`` maps a number of regions to the number of pictures that have it. ``smallest`` and ``largest`` are the
    least and greatest width and height of pictures in pixels.
    """

    folder: str
    pictures: int
    regions: int
    feature_size: int
    feature_dtype: str
    bytes: int
    object_classes: int
    attribute_classes: int
    fewest_regions: int
    most_regions: int
    histogram: dict[int, int]
    smallest: tuple[int, int]
    largest: tuple[int, int]
    features_of: dict[str, Any]
    sources: list[dict[str, Any]]
    files: dict[str, str]
    key: str


@dataclass(frozen=True)
class RegionSummary:
    """A region: left, top, right and bottom edge in pixels, classes with the detector's confidence, and features."""

    box: tuple[float, float, float, float]
    object: tuple[str, float] | None
    attribute: tuple[str, float] | None
    feature_norm: float

    @property
    def label(self) -> str:
        """Attribute and class, as ``red car``; empty without either."""
        return " ".join(label[0] for label in (self.attribute, self.object) if label is not None)


@dataclass(frozen=True)
class PictureSummary:
    """A picture of a store."""

    name: str
    width: int
    height: int
    regions: list[RegionSummary]


@dataclass(frozen=True)
class ClassNames:
    """Names of object and attribute classes in the order of their numbers; None = the numbers themselves."""

    objects: list[str] | None = None
    attributes: list[str] | None = None

    @classmethod
    def of(cls, store: RegionStore, objects: Path | None = None, attributes: Path | None = None) -> ClassNames:
        """Names from files of one a line; without files, those of scenes of NLVR v1.

        Raises:
            DataError: a file cannot be read, or has fewer names than the store has classes.
        """
        manifest = store.manifest
        scenes = manifest.features_of.get("backend") == nlvr1.FEATURES_OF["backend"]
        known = (list(nlvr1.SHAPES), list(nlvr1.COLOURS)) if scenes else (None, None)
        counts = (manifest.object_classes, manifest.attribute_classes)
        names = [
            default if path is None else _names(path, count)
            for path, default, count in zip((objects, attributes), known, counts, strict=True)
        ]
        return cls(*names)


def summarize(store: RegionStore) -> StoreSummary:
    """Describe a store, reading the numbers of regions and the sizes of its pictures."""
    manifest = store.manifest
    histogram = np.zeros(manifest.most_regions + 1, dtype=np.int64)
    smallest, largest = np.full(2, 1 << 31), np.zeros(2, dtype=np.int64)
    for start in range(0, len(store), _TOGETHER):
        rows = np.arange(start, min(start + _TOGETHER, len(store)))
        histogram += np.bincount(store.counts(rows), minlength=len(histogram))
        sizes = store.sizes(rows)
        smallest, largest = np.minimum(smallest, sizes.min(axis=0)), np.maximum(largest, sizes.max(axis=0))
    return StoreSummary(
        folder=str(store.folder),
        pictures=manifest.pictures,
        regions=manifest.regions,
        feature_size=manifest.feature_size,
        feature_dtype=manifest.feature_dtype,
        bytes=sum(file.bytes for file in manifest.files.values()),
        object_classes=manifest.object_classes,
        attribute_classes=manifest.attribute_classes,
        fewest_regions=int(np.flatnonzero(histogram)[0]),
        most_regions=manifest.most_regions,
        histogram={number: int(count) for number, count in enumerate(histogram) if count},
        smallest=(int(smallest[0]), int(smallest[1])),
        largest=(int(largest[0]), int(largest[1])),
        features_of=manifest.features_of,
        sources=[source.model_dump() for source in manifest.sources],
        files={name: file.sha256 for name, file in manifest.files.items()},
        key=manifest.key,
    )


def describe(store: RegionStore, name: str, names: ClassNames) -> PictureSummary:
    """The regions of one picture. Raises ``DataError`` where the store does not hold it."""
    rows = store.rows([name], "--picture")
    width, height = (int(length) for length in store.sizes(rows)[0])
    read = store.regions(rows)
    scale = np.array([width, height, width, height])

    def label(ids: Any, scores: Any, known: list[str] | None, region: int) -> tuple[str, float] | None:
        if ids is None:
            return None
        number = int(ids[0, region])
        return (known[number] if known else str(number)), float(scores[0, region])

    regions = []
    for region in range(int(read.present.sum())):
        left, top, right, bottom = (float(edge) for edge in read.boxes[0, region] * scale)
        regions.append(
            RegionSummary(
                box=(left, top, right, bottom),
                object=label(read.object_ids, read.object_scores, names.objects, region),
                attribute=label(read.attribute_ids, read.attribute_scores, names.attributes, region),
                feature_norm=float(np.linalg.norm(read.features[0, region].astype(np.float64))),
            )
        )
    return PictureSummary(name, width, height, regions)


def _names(path: Path, count: int) -> list[str]:
    names = [line.strip() for line in read_lines([path])]
    if len(names) < count:
        raise DataError(f"{path}: {counted(len(names), 'name')} for {count} classes; one a line is needed")
    return names
