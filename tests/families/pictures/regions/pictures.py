"""Random pictures for tests of the store, and pictures as lines of feature files."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np

from capt.pretrain.regions.picture import Labels, Picture


def random_pictures(
    count: int, *, size: int = 6, regions: tuple[int, int] = (1, 5), labels: bool = True, seed: int = 0
) -> Iterator[Picture]:
    """``count`` pictures named ``p0``, ``p1``, ... with from ``regions[0]`` to ``regions[1]`` regions."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        n = int(rng.integers(regions[0], regions[1] + 1))
        width, height = (int(length) for length in rng.integers(20, 700, 2))
        corners = np.sort(rng.random((n, 2, 2)), axis=1).reshape(n, 4) * [width, height, width, height]
        objects, attributes = (
            Labels(rng.integers(0, classes, n), rng.random(n, dtype=np.float32)) for classes in (9, 4)
        )
        yield Picture(
            f"p{number}",
            width,
            height,
            rng.normal(size=(n, size)).astype(np.float32),
            corners.astype(np.float32),
            objects if labels else None,
            attributes if labels else None,
        )


_TYPES = {**dict.fromkeys(("objects_id", "attrs_id"), "<i8"), **dict.fromkeys(("objects_conf", "attrs_conf"), "<f4")}
"""Type of a file's arrays; the others are fp32 too."""


def encode(picture: Picture) -> bytes:
    """The picture as a line of a feature file: what `capt.pretrain.regions.tsv.decode` gives back, features in fp32."""

    def text(values: np.ndarray | None, field: str) -> bytes:
        array = None if values is None else np.ascontiguousarray(values, dtype=_TYPES.get(field, "<f4"))
        return b"" if array is None else base64.b64encode(array.data)

    objects, attributes = (labels or (None, None) for labels in (picture.objects, picture.attributes))
    fields = [
        *(picture.id.encode(), str(picture.height).encode(), str(picture.width).encode()),
        *(text(objects[0], "objects_id"), text(objects[1], "objects_conf")),
        *(text(attributes[0], "attrs_id"), text(attributes[1], "attrs_conf")),
        *(str(len(picture.features)).encode(), text(picture.boxes, "boxes"), text(picture.features, "features")),
    ]
    return b"\t".join(fields) + b"\n"
