"""A picture as its regions: what every source of pictures yields, and what a store takes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64

from capt.pretrain.base.errors import DataError, counted, shown
from capt.pretrain.base.files import printable
from capt.pretrain.regions.manifest import LONGEST_NAME, FeatureType

# How a picture is called: as its file is, without the ending, with folders or without them.
#
# Extraction and imports name the pictures of a store, data files name those that they are about. Data may write more
# folders than the store has (``photos/a/1.jpg`` of ``a/1``, or of ``1``), and an ending or none.


ENDINGS = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Endings of the names of files of pictures, in any case."""


def picture_name(file: str) -> str:
    """The name of a picture's file without its ending: ``a/1`` of ``./a/1.JPG``. Other endings stay."""
    path = PurePosixPath(file)
    whole = path.with_suffix("") if path.suffix.lower() in ENDINGS else path
    return str(whole).lstrip("/") if path.name else file


def tails_of(name: str) -> list[str]:
    """The name of a picture with all its folders, and with one less each time."""
    parts = picture_name(name).split("/")
    return ["/".join(parts[at:]) for at in range(len(parts))]


def are_one(name: str, other: str) -> bool:
    """Return whether two names may be of one picture: one has all folders of the other, or more before them."""
    short, long = sorted((picture_name(name), picture_name(other)), key=len)
    return long == short or long.endswith(f"/{short}")


# The two ways in which pictures of COCO are named: ``COCO_train2014_000000458752`` and ``458752``.
#
# Data files of VQA v2 and COCO captions give numbers, feature files mostly give names. Visual Genome and GQA use
# numbers too, and theirs are other pictures. So a name in one form represents the other form only in a store that has
# no picture named in the form that was asked for.


SUBSETS = ("train2014", "val2014", "test2014", "test2015", "train2017", "val2017", "test2017")
_NAME = re.compile(r"COCO_[a-z0-9]{1,20}_([0-9]{12})")
_NUMBER = re.compile(r"[0-9]{1,12}")


def other_forms(name: str, *, numbers: bool, coco: bool) -> list[str]:
    """The names under which a store may hold the picture that data call ``name``, which itself it does not hold.

    Args:
        name: as the data give it.
        numbers: whether the store has pictures that are named by a number.
        coco: whether it has pictures that are named ``COCO_...``.
    """
    if match := _NAME.fullmatch(name):
        # A store with names of the form that is asked for would have this one: its numbers are other pictures.
        return [] if coco else [str(int(match[1])), match[1]]
    if not _NUMBER.fullmatch(name):
        return []
    number = int(name)
    padded = f"{number:012}"
    plain = [form for form in (str(number), padded) if form != name]  # of 2017, file names are padded numbers
    return plain if numbers else [f"COCO_{subset}_{padded}" for subset in SUBSETS]


class Labels(NamedTuple):
    """A detector's classes of the regions of a picture, and how sure it is of each."""

    ids: Int64[np.ndarray, " regions"]
    scores: Float32[np.ndarray, " regions"]


class Picture(NamedTuple):
    """The regions of one picture.

    Attributes:
        id: the picture's name in data files, such as ``COCO_train2014_000000458752``.
        width: in pixels.
        height: in pixels.
        features: one row a region.
        boxes: left, top, right and bottom edge of each region in pixels.
        objects: classes of objects, or None.
        attributes: classes of attributes, or None.
    """

    id: str
    width: int
    height: int
    features: Float[np.ndarray, "regions size"]
    boxes: Float32[np.ndarray, "regions 4"]
    objects: Labels | None = None
    attributes: Labels | None = None


# Features of different models are numbers of different meaning, and are never mixed: in what do two kinds differ?


def feature_differences(a: Mapping[str, Any], b: Mapping[str, Any], most: int = 3) -> str:
    """Differences of two stores' ``features_of``: the first ``most`` keys with the values of both; empty if none.

    Keys of nested mappings are joined by dots. A key that one of them lacks counts as None.
    """
    unequal = list(_differences(a, b, ""))
    text = "; ".join(f"{key} is {shown(x, 70)} and {shown(y, 70)}" for key, x, y in unequal[:most])
    return text + (f"; and {len(unequal) - most} more" if len(unequal) > most else "")


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _differences(x, y, f"{prefix}{key}.")
        elif x != y:
            yield f"{prefix}{key}", x, y


# Whether a picture fits into a store, and its arrays in the types of the store.


TOLERANCE = 1e-5
"""Largest part of the width or height by which an edge may be outside of its picture."""
_WIDEST = 1 << 24
_MOST_CLASSES = 1 << 20
_TYPES = {"fp16": np.float16, "fp32": np.float32}


def checked(picture: Picture, dtype: FeatureType) -> Picture:
    """The picture with features of type ``dtype``, fp32 boxes and scores, and int32 classes.

    Raises:
        DataError: it has no usable name or size; no region; features, boxes or labels of another shape than its number
            of regions asks for, or not finite (in ``dtype``); a box with an edge outside of the picture; a class below
            0; or a score outside of [0, 1].
    """
    check_name(picture.id)
    name = shown(picture.id)
    for what, length in (("width", picture.width), ("height", picture.height)):
        if not 0 < length <= _WIDEST:
            raise DataError(f"picture {name}: a {what} of {shown(length)} pixels; it must be from 1 to {_WIDEST}")
    features, regions = picture.features, len(picture.features)
    if features.ndim != 2 or not regions or not features.shape[1]:
        raise DataError(f"picture {name}: features of shape {features.shape}; one row a region is needed, at least one")
    return Picture(
        picture.id,
        int(picture.width),
        int(picture.height),
        _checked_features(features, dtype, name),
        _checked_boxes(picture, name),
        _checked_labels(picture.objects, regions, "object", name),
        _checked_labels(picture.attributes, regions, "attribute", name),
    )


def check_name(name: str) -> None:
    """Refuse what is no name for a picture."""
    if not name or not name.isprintable() or len(name.encode(errors="replace")) > LONGEST_NAME:
        raise DataError(f"{shown(name)} is not a name for a picture: 1 to {LONGEST_NAME} bytes of printable text are")


def _checked_features(
    features: Float[np.ndarray, "regions size"], dtype: FeatureType, name: str
) -> Float[np.ndarray, "regions size"]:
    if not np.isfinite(features).all():
        raise DataError(f"picture {name}: features that are not finite")
    with np.errstate(over="ignore"):
        stored: np.ndarray = features.astype(_TYPES[dtype], copy=False)
    if stored is not features and not np.isfinite(stored).all():
        raise DataError(f"picture {name}: a feature of {np.abs(features).max():g} does not fit {dtype}; take fp32")
    return stored


def _checked_boxes(picture: Picture, name: str) -> Float[np.ndarray, "regions 4"]:
    boxes = picture.boxes.astype(np.float32, copy=False)
    if boxes.shape != (len(picture.features), 4):
        raise DataError(f"picture {name}: boxes of shape {boxes.shape} for {len(picture.features)} regions")
    # Edges in parts of the picture, so that one tolerance serves for any size.
    edges = boxes / np.array([picture.width, picture.height] * 2, dtype=np.float32)
    inside = (edges >= -TOLERANCE) & (edges <= 1 + TOLERANCE)  # False for NaN
    good = inside.all(axis=1) & (boxes[:, 0] <= boxes[:, 2]) & (boxes[:, 1] <= boxes[:, 3])
    if not good.all():
        first = int(np.argmin(good))
        box = " ".join(f"{edge:g}" for edge in boxes[first])
        raise DataError(
            f"picture {name}: box {first + 1} (left top right bottom = {box}) is not in the picture of "
            f"{picture.width} x {picture.height} pixels"
        )
    # Boxes in parts of the picture have the right shape, but would all be one pixel.
    if 0 < boxes.max() <= 1 and min(picture.width, picture.height) > 2:
        raise DataError(
            f"picture {name}: all boxes lie in its first pixel, as those in parts of a picture do; give them in pixels"
        )
    return boxes


def _checked_labels(labels: Labels | None, regions: int, what: str, name: str) -> Labels | None:
    if labels is None:
        return None
    ids, scores = labels
    if ids.shape != (regions,) or scores.shape != (regions,):
        raise DataError(f"picture {name}: {len(ids)} {what} classes and {len(scores)} scores for {regions} regions")
    if ids.min() < 0 or ids.max() >= _MOST_CLASSES:
        raise DataError(f"picture {name}: {what} class {ids[(ids < 0) | (ids >= _MOST_CLASSES)][0]}")
    scores = scores.astype(np.float32, copy=False)
    good = (scores >= -TOLERANCE) & (scores <= 1 + TOLERANCE)
    if not good.all():
        raise DataError(f"picture {name}: an {what} score of {scores[~good][0]:g}; scores are from 0 to 1")
    return Labels(ids.astype(np.int32, copy=False), scores)


# Pictures that cannot be used: each is named, and either stops the extraction or is counted.


logger = logging.getLogger(__name__)


class Damage:
    """Pictures that cannot be used: counted, or refused.

    Args:
        skip: continue without them. Otherwise the first one stops the extraction.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.skipped: list[str] = []

    def report(self, where: object, why: str) -> None:
        """Say which picture cannot be used and why. Raises ``DataError`` unless such pictures are skipped."""
        text = f"{where}: {printable(why)}"
        if not self.skip:
            raise DataError(f"{text}; --skip-damaged leaves such pictures out")
        self.skipped.append(str(where))
        logger.warning("left out: %s", text)

    def summary(self) -> str:
        """Describe how many were left out, with the first of them; empty if none was."""
        if not self.skipped:
            return ""
        first = ", ".join(self.skipped[:3])
        return f"{counted(len(self.skipped), 'picture')} LEFT OUT as damaged: {first}" + (
            ", ..." if len(self.skipped) > 3 else ""
        )
