"""Random pictures for tests of the store."""

from __future__ import annotations

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
