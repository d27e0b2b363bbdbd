"""Whether a picture fits into a store, and its arrays in the types of the store."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from pretrain.base.errors import DataError, shown
from pretrain.regions.manifest import LONGEST_NAME, FeatureType
from pretrain.regions.picture import Labels, Picture

TOLERANCE = 1e-5
"""By how much an edge, as a part of the width or height, may lie outside of its picture."""
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
        raise DataError(f"{shown(name)} is no name for a picture: 1 to {LONGEST_NAME} bytes of printable text are")


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
    edges = boxes / np.array([picture.width, picture.height] * 2, dtype=np.float32)
    inside = (edges >= -TOLERANCE) & (edges <= 1 + TOLERANCE)  # False for NaN
    good = inside.all(axis=1) & (boxes[:, 0] <= boxes[:, 2]) & (boxes[:, 1] <= boxes[:, 3])
    if not good.all():
        first = int(np.argmin(good))
        box = " ".join(f"{edge:g}" for edge in boxes[first])
        raise DataError(
            f"picture {name}: box {first + 1} (left top right bottom = {box}) does not lie in the picture of "
            f"{picture.width} x {picture.height} pixels"
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
