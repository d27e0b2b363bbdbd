"""Diagnostics of a contrastive step, beside its loss."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.engine import distributed


class ContrastStats:
    """Means over this rank's anchors since the object was made; `over_ranks` gives those over all anchors.

    Pass one as ``stats`` to the loss. It costs one more pass over the logits, so pass it on the steps that are logged.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)

    def update(
        self,
        positive_probability: Float[Tensor, " m"],
        margin: Float[Tensor, " m"],
        effective_negatives: Float[Tensor, " m"],
    ) -> None:
        """Add a batch: per anchor, the softmax weight of its positive, by how much its cosine to the positive exceeds
        that to the nearest negative, and its `effective_number` of negatives."""
        each = (torch.ones_like(margin), positive_probability, margin > 0, margin, effective_negatives)
        self._sums = self._sums.to(margin.device) + torch.stack([values.double().sum() for values in each])

    def over_ranks(self, group: distributed.Group = None) -> ContrastStats:
        """The statistics of the anchors of all ranks, each anchor counting once (collective: five numbers)."""
        whole = ContrastStats()
        whole._sums = distributed.all_reduce_sum(self._sums, group)
        return whole

    @property
    def anchors(self) -> int:
        """How many there were."""
        return int(self._sums[0])

    @property
    def positive_probability(self) -> float:
        """Mean softmax weight of the positive, 0 to 1."""
        return self._mean(1)

    @property
    def top1(self) -> float:
        """Share of the anchors that retrieve their positive first among all keys of the loss, 0 to 1."""
        return self._mean(2)

    @property
    def margin(self) -> float:
        """Mean of the anchors' cosine to their positive less that to their nearest negative, -2 to 2."""
        return self._mean(3)

    @property
    def effective_negatives(self) -> float:
        """Mean over the anchors of the `effective_number` of their negatives."""
        return self._mean(4)

    def _mean(self, column: int) -> float:
        return float(self._sums[column] / self._sums[0].clamp_min(1))


def effective_number(total: Float[Tensor, " m"], squares: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    r"""Over how many negatives the softmax of each anchor is spread, Kish's effective sample size.

    .. math:: \frac{(\sum_j u_{ij})^2}{\sum_j u_{ij}^2}, \qquad u_{ij} = e^{q_i \cdot k_j / \tau}

    over all negatives of the loss, live and queued, on all ranks; where queued rows are weighted, with their weights in
    :math:`u`. It is 1 where one negative has all the weight, their number where all have the same, 0 without any.
    """
    return total.square() / squares.clamp_min(torch.finfo(squares.dtype).tiny)
