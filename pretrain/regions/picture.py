"""A picture as its regions: what every source of pictures yields, and what a store takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64


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
