"""A micro-batch of pairs of a sentence and a picture, and how both are corrupted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class PairBatch:
    """``n`` pairs of a sentence (``L`` tokens) and a picture (``R`` regions).

    The corrupted view is ``corrupted`` and `corrupted_features`; the original one ``tokens`` and ``features``. Flat
    positions count through the whole micro-batch: token ``j`` of pair ``i`` is ``i L + j``.

    Attributes:
        tokens: ids, padded on the right.
        corrupted: the same with words masked.
        masked: flat positions of the words to predict.
        labels: their ids.
        features: of regions, zeros where there is none.
        boxes: edges divided by width and height.
        present: True where there is a region.
        zeroed: True for a masked region whose features are zeros in the corrupted view.
        replaced: flat positions of regions that have the features of another region in the corrupted view.
        replacements: those features.
        masked_regions: flat positions of all masked regions, whatever became of their features: region ``r`` of pair
            ``i`` is ``i R + r``.
        object_ids: None in a store without object labels (so the other three).
        object_scores: the detector's confidence.
        attribute_ids: as for objects.
        attribute_scores: as for objects.
        matched: 1 where the sentence belongs to the picture, 0 where it does not, -100 in a row that only fills up the
            batch and has nothing to predict.
        answers: class of the answer, -100 for a pair without one; None where the job has no QA objective.
        ids: instance of each pair, for the contrast.
        numbers: which pair of the data each is, whatever sentence it is shown with.
        padded: whether any token of the micro-batch is padding.
        missing: whether any region of the micro-batch is absent.
    """

    tokens: Int[Tensor, "n L"]
    corrupted: Int[Tensor, "n L"]
    masked: Int[Tensor, " k"]
    labels: Int[Tensor, " k"]
    features: Float[Tensor, "n R f"]
    boxes: Float[Tensor, "n R 4"]
    present: Bool[Tensor, "n R"]
    zeroed: Bool[Tensor, "n R"]
    replaced: Int[Tensor, " r"]
    replacements: Float[Tensor, "r f"]
    masked_regions: Int[Tensor, " m"]
    object_ids: Int[Tensor, "n R"] | None
    object_scores: Float[Tensor, "n R"] | None
    attribute_ids: Int[Tensor, "n R"] | None
    attribute_scores: Float[Tensor, "n R"] | None
    matched: Int[Tensor, " n"]
    answers: Int[Tensor, " n"] | None
    ids: Int[Tensor, " n"]
    numbers: Int[Tensor, " n"]
    padded: bool
    missing: bool

    def to(self, device: torch.device) -> PairBatch:
        """The batch on a device (asynchronously from pinned memory)."""
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=True) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, **moved)

    def corrupted_features(self) -> Float[Tensor, "n R f"]:
        """The features of the corrupted view."""
        noisy = self.features.masked_fill(self.zeroed.unsqueeze(-1), 0.0)
        flat = noisy.view(-1, noisy.shape[-1])
        flat[self.replaced] = self.replacements.to(flat.dtype)
        return noisy
