"""What is collected over batches and ranks: rows, and sums over masked tokens."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pretrain.base.errors import DataError
from pretrain.contrast.metrics import first_direction, uniformity
from pretrain.engine.distributed import all_reduce_max, all_reduce_sum, device, gather_ragged, rank, world_size

_SAMPLE = 256
"""Rows of a step over all ranks: enough for both figures, and their Gram matrix is small."""


class PairAccumulator:
    """The rows of both views in the validation batches of this rank; ranks may hold different numbers of rows."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def update(self, x: Float[Tensor, "b d"], x_hat: Float[Tensor, "b d"]) -> None:
        """Add a batch: row i of ``x_hat`` represents the corruption of the text of row i of ``x``."""
        self._rows.append(torch.stack((x.detach().float(), x_hat.detach().float()), dim=1))

    def gather(self) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
        """All ranks' rows of both views, on every rank (collective; N x d floats twice).

        Raises:
            DataError: there are fewer than two pairs on all ranks together.
        """
        rows = torch.cat(self._rows) if self._rows else torch.zeros(0, 2, 0, device=device())
        width = int(all_reduce_max(torch.tensor(rows.shape[2], device=rows.device)))
        pairs, _ = gather_ragged(rows if len(rows) else rows.new_zeros(0, 2, width))  # a rank may have seen no batch
        if len(pairs) < 2:
            raise DataError(f"validation needs at least two sequences to compare, got {len(pairs)}")
        return pairs[:, 0], pairs[:, 1]


class RowSample:
    """Some rows of a training step, to see how they are spread: the first of each rank, `_SAMPLE` of all ranks.

    Of more ranks than that the first ones give a row each.
    """

    def __init__(self) -> None:
        self._room = (_SAMPLE + world_size() - 1 - rank()) // world_size()
        self._rows: list[Tensor] = []

    def update(self, rows: Float[Tensor, "b d"]) -> None:
        """Add unit rows of this rank; those beyond its part of the sample are left out."""
        self._rows.append(rows.detach()[: self._room].float())
        self._room -= len(self._rows[-1])

    def compute(self) -> dict[str, float]:
        """``uniformity`` and ``first_direction`` of the rows of all ranks (collective; N x d floats).

        Rows that are not finite (fp16 overflow) do not count. Of fewer than two rows both are NaN.
        """
        rows, _ = gather_ragged(torch.cat(self._rows))
        rows = rows[rows.isfinite().all(dim=1)]
        if len(rows) < 2:
            return {"uniformity": math.nan, "first_direction": math.nan}
        return {"uniformity": uniformity(rows), "first_direction": first_direction(rows)}


class MaskedTokenAccumulator:
    """Sums of the MLM loss and of right predictions over masked tokens, so that every masked token weighs the same."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device())

    def update(self, loss_sum: Float[Tensor, ""], correct: Shaped[Tensor, ""], count: Shaped[Tensor, ""]) -> None:
        """Add the sums of a batch: the cross entropy in nats, the right predictions, the masked tokens."""
        self._sums += torch.stack((loss_sum.detach().double(), correct.double(), count.double()))

    def compute(self) -> dict[str, float]:
        """``loss/mlm`` (mean nats a masked token) and ``accuracy/mlm`` over all ranks (collective).

        Raises:
            DataError: no token was masked on any rank.
        """
        loss, correct, count = all_reduce_sum(self._sums).tolist()
        if count == 0:
            raise DataError("validation saw no masked token: the corruption masks none, or the texts are too short")
        return {"loss/mlm": loss / count, "accuracy/mlm": correct / count}
