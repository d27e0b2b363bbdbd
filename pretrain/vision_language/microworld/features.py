"""What a detector would have made of a scene: features that depend on class, colour and size, and are noisy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float32, Int64

from pretrain.base.randomness import generator_for
from pretrain.regions.picture import Labels, Picture
from pretrain.vision_language.microworld.scenes import CLASSES, COLOURS, HEIGHT, WIDTH, Scene

Vectors = Float32[np.ndarray, "_ size"]


def picture(name: str, scene: Scene, seed: int, number: int, size: int, noise: float, stream: str = "scene") -> Picture:
    """The regions of a scene, the surest first.

    The features of a thing are ``a_class + b_colour + c_size + s e`` with fixed vectors a, b, c and ``e`` from N(0, I).
    Its noise level ``s`` is ``noise`` times a factor between 0.5 and 1.5, and the detector's confidence falls with it:
    ``1 / (1 + s^2)``. The vectors depend on ``size`` alone, so that worlds of different seeds look alike.

    Args:
        name: of the picture.
        scene: what it shows.
        seed: of the world.
        number: of the scene in its stream; the noise depends on seed, stream and number alone.
        size: of the features.
        noise: 0 gives every thing of a class, colour and size the same features.
        stream: what the scene was drawn from.
    """
    rng = generator_for(f"microworld/{stream}/features", seed, 0, number)
    levels = (noise * rng.uniform(0.5, 1.5, len(scene))).astype(np.float32)
    order = np.argsort(levels, kind="stable")
    things, levels = [scene[i] for i in order], levels[order]
    kinds, colours, sizes = (np.array(column, dtype=np.int64) for column in list(zip(*things, strict=True))[:3])
    of_kind, of_colour, of_size = _vectors(size)
    spread = levels[:, None] * rng.standard_normal((len(things), size), dtype=np.float32)
    features = of_kind[kinds] + of_colour[colours] + of_size[sizes] + spread
    boxes = np.array([thing.box for thing in things], dtype=np.float32)
    return Picture(name, WIDTH, HEIGHT, features, boxes, _labels(kinds, levels), _labels(colours, levels))


def _labels(ids: Int64[np.ndarray, " n"], levels: Float32[np.ndarray, " n"]) -> Labels:
    return Labels(ids, (1 / (1 + levels**2)).astype(np.float32))


@lru_cache(maxsize=8)
def _vectors(size: int) -> tuple[Vectors, Vectors, Vectors]:
    rng = generator_for("microworld/vectors", 0, 0, size)
    kinds, colours, sizes = (rng.standard_normal((n, size), dtype=np.float32) for n in (len(CLASSES), len(COLOURS), 2))
    return kinds, colours, sizes
