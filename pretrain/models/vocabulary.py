"""The tables with a row for each token id, padded to a multiple that matrix units prefer, or cut back to the ids."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TABLES = ("encoder.embeddings.word.weight", "mlm.weight", "mlm.bias")
"""Parameters of `CaptModel` that have a row for each token id."""


class WordEmbedding(nn.Embedding):
    """``classes`` rows for the token ids, then rows of zeros up to ``rows``, which belong to no id.

    The random draws are those of a table without the zeros, so that a seed gives the same model for any padding.
    """

    def __init__(self, classes: int, rows: int, width: int, padding_idx: int) -> None:
        super().__init__(classes, width, padding_idx=padding_idx)
        self.classes, self.num_embeddings = classes, rows
        if rows > classes:
            self.weight = nn.Parameter(F.pad(self.weight.detach(), (0, 0, 0, rows - classes)))

    @torch.no_grad()
    def draw(self, std: float) -> None:
        """N(0, ``std``) for the ids, in place; zeros beyond them."""
        nn.init.normal_(self.weight[: self.classes], 0.0, std)
        nn.init.zeros_(self.weight[self.classes :])


def with_rows(state: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """``state`` with ``rows`` rows in each of :data:`TABLES`: zeros are appended, or the last rows are left out."""
    out = dict(state)
    for name in TABLES:
        if name in out and out[name].ndim > 0 and len(out[name]) != rows:
            beyond = (0, 0) * (out[name].ndim - 1) + (0, rows - len(out[name]))
            out[name] = F.pad(out[name], beyond)
    return out
