"""The three boxes of an NLVR v1 picture in another order. What a sentence says of them stays true or false.

The data set itself came with all six orders of every picture (Suhr et al. 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from finetune.order import RowNumbers
from pretrain.base.errors import ConfigError
from pretrain.base.randomness import generator_for
from pretrain.regions.nlvr1 import BOXES, COLUMNS, STEP, WIDTH
from pretrain.regions.store import Regions, RegionStore

_FIRST = COLUMNS.index("first box")
_NUMBER = slice(_FIRST, _FIRST + BOXES)


def permuted(regions: Regions, orders: Int64[np.ndarray, "n boxes"]) -> Regions:
    """The regions with box ``k`` of picture ``i`` at place ``orders[i, k]``: other edges and another box number."""
    features, boxes = regions.features.copy(), regions.boxes.copy()
    before = features[..., _NUMBER].argmax(-1)
    after = np.take_along_axis(orders, before, axis=1)
    features[..., _NUMBER] = np.eye(BOXES, dtype=features.dtype)[after] * regions.present[..., None]
    shift = ((after - before) * regions.present * np.float32(STEP / WIDTH)).astype(np.float32)
    boxes[..., [0, 2]] += shift[..., None]
    return regions._replace(features=features, boxes=boxes)


@dataclass(frozen=True)
class Permute:
    """A random order of the boxes for every sample that is trained on (`finetune.visual.rows.Augment`)."""

    seed: int

    def __call__(self, regions: Regions, samples: RowNumbers) -> Regions:
        """The regions of one picture a sample, permuted by the sample's number."""
        draws = [generator_for("finetune/visual/permute", self.seed, 0, int(sample)) for sample in samples]
        return permuted(regions, np.array([draw.permutation(BOXES) for draw in draws], dtype=np.int64))


def require_scenes(store: RegionStore) -> None:
    """Raise ``ConfigError`` for a store whose features do not say in which box a region lies."""
    backend = store.manifest.features_of.get("backend")
    if backend != "nlvr1" or store.manifest.feature_size != len(COLUMNS):
        raise ConfigError(
            f"model.augment permute: {store.folder} was made by {backend}, and only features of scenes (capt regions "
            "import FILE.json --format nlvr1) tell which box a region lies in; set model.augment=none"
        )
