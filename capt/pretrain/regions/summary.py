"""The numbers of a region store and of one of its pictures that ``capt regions inspect`` shows."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions.class_names import ClassNames
from capt.pretrain.regions.store import RegionStore

# A picture of a region store with its boxes drawn.


_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
_LONGEST_SIDE, _DPI = 12.0, 100
"""Inches, and pixels an inch."""


def draw(picture: PictureSummary, image: Image.Image | None = None) -> bytes:
    """A PNG of the boxes of a picture with their labels, over ``image`` or on white.

    Raises:
        DataError: ``image`` has other proportions than the picture in the store.
    """
    # The longer side fills the figure, and the proportions are those of the picture.
    inches = [_LONGEST_SIDE * length / max(picture.width, picture.height) for length in (picture.width, picture.height)]
    figure = Figure(figsize=(max(inches[0], 0.5), max(inches[1], 0.5)), dpi=_DPI)
    FigureCanvasAgg(figure)
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.set_xlim(0, picture.width)
    # The origin of a picture is its upper left corner, that of a plot the lower left one.
    axis.set_ylim(picture.height, 0)
    axis.set_axis_off()
    if image is not None:
        _require_same_proportions(image.size, picture)
        axis.imshow(image, extent=(0, picture.width, picture.height, 0), aspect="auto")
    for number, region in enumerate(picture.regions):
        left, top, right, bottom = region.box
        colour = _COLOURS[number % len(_COLOURS)]
        axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1.5))
        axis.text(
            left, top, region.label or str(number + 1), color="white", fontsize=8,
            # A label above the box, or in it where there is no room above.
            va="bottom" if top > picture.height / 10 else "top",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0, "alpha": 0.8},
        )  # fmt: skip
    axis.text(
        0.5, 0.005, f"{picture.name}: {picture.width} x {picture.height} pixels, {len(picture.regions)} regions; "
        f"features: {picture.features}", transform=axis.transAxes, color="black", fontsize=8, ha="center", va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 2.0, "alpha": 0.8},
    )  # fmt: skip
    buffer = io.BytesIO()
    # Names of files may hold a $, which is no mathematics here.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font lacks is drawn as a box
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _require_same_proportions(size: tuple[int, int], picture: PictureSummary) -> None:
    width, height = size
    # Rounding moves a side by a pixel at most.
    if abs(width * picture.height - height * picture.width) > max(width, height, picture.width, picture.height):
        raise DataError(
            f"the picture to draw over has {width} x {height} pixels, and {picture.name} has "
            f"{picture.width} x {picture.height}: it is another picture"
        )


_TOGETHER = 1 << 20
_PICTURES = 64
"""Pictures whose features and boxes are looked at."""


@dataclass(frozen=True)
class FeatureFigures:
    """Figures of features by which a person sees whether they can be right.

    Attributes:
        pictures: how many were looked at, evenly over the store.
        mean: of all numbers.
        deviation: of all numbers.
        least: of all numbers.
        greatest: of all numbers.
        zeros: share of numbers that are 0.
    """

    pictures: int
    mean: float
    deviation: float
    least: float
    greatest: float
    zeros: float

    @classmethod
    def of(cls, features: np.ndarray, pictures: int = 1) -> FeatureFigures:
        """The figures of these features."""
        values = features.astype(np.float64)
        return cls(
            pictures, float(values.mean()), float(values.std()), float(values.min()), float(values.max()),
            float((values == 0).mean()),
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.4g}, deviation {self.deviation:.4g}, from {self.least:.4g} to {self.greatest:.4g}, "
            f"{self.zeros:.0%} zeros"
        )


@dataclass(frozen=True)
class StoreSummary:
    """The content of a store.

    ``histogram`` maps a number of regions to the number of pictures that have it. ``smallest`` and ``largest`` are the
    least and greatest width and height of pictures in pixels; ``box_smallest`` and ``box_largest`` are those of the
    boxes in the pictures that were looked at for ``features``.
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
    box_smallest: tuple[float, float]
    box_largest: tuple[float, float]
    features: FeatureFigures
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
    features: FeatureFigures


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
    # Features are far larger than sizes: those of a few pictures, evenly over the store, represent all.
    looked_at = np.unique(np.linspace(0, len(store) - 1, _PICTURES).astype(np.int64))
    read = store.regions(looked_at)
    lengths = (read.boxes[..., 2:] - read.boxes[..., :2]) * store.sizes(looked_at)[:, None]
    lengths = lengths[read.present]
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
        box_smallest=_pair(lengths.min(axis=0)),
        box_largest=_pair(lengths.max(axis=0)),
        features=FeatureFigures.of(read.features[read.present], len(looked_at)),
        features_of=manifest.features_of,
        sources=[source.model_dump() for source in manifest.sources],
        files={name: file.sha256 for name, file in manifest.files.items()},
        key=manifest.key,
    )


def _pair(lengths: np.ndarray) -> tuple[float, float]:
    return float(lengths[0]), float(lengths[1])


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
    # Regions of one picture are not padded, so all of its rows are present.
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
    return PictureSummary(name, width, height, regions, FeatureFigures.of(read.features[0, : len(regions)]))
