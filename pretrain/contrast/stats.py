"""Diagnostics of a contrastive step, beside its loss."""

from __future__ import annotations

from torch import Tensor


class ContrastStats:
    """Means over this rank's anchors since the object was made.

    Pass one as ``stats`` to the loss. It costs one more pass over the logits, so pass it on the steps that are logged.
    """

    def __init__(self) -> None:
        self.anchors = 0
        self._positive_probability: Tensor | float = 0.0
        self._top1: Tensor | float = 0.0
        self._margin: Tensor | float = 0.0

    def update(self, positive_probability: Tensor, margin: Tensor) -> None:
        """Add a batch: per anchor, the softmax weight of its positive, and by how much its cosine to the positive
        exceeds that to the nearest negative."""
        self.anchors += len(margin)
        self._positive_probability += positive_probability.double().sum()
        self._top1 += (margin > 0).double().sum()
        self._margin += margin.double().sum()

    @property
    def positive_probability(self) -> float:
        """Mean softmax weight of the positive, 0 to 1."""
        return float(self._positive_probability) / max(self.anchors, 1)

    @property
    def top1(self) -> float:
        """Share of the anchors that retrieve their positive first among all keys of the loss, 0 to 1."""
        return float(self._top1) / max(self.anchors, 1)

    @property
    def margin(self) -> float:
        """Mean of the anchors' cosine to their positive less that to their nearest negative, -2 to 2."""
        return float(self._margin) / max(self.anchors, 1)
