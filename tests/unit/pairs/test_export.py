"""The linear map that leaves the first columns of a model of pairs."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from capt.pretrain.pairs.export import projections


def test_a_cut_model_has_the_first_columns_as_unit_rows() -> None:
    rows = torch.randn(5, 12)
    for projection in (None, torch.nn.Linear(12, 9), torch.nn.Linear(12, 9, bias=False)):
        vectors = rows if projection is None else projection(rows)
        for width in (1, 4, 9, None):
            (cut,) = projections(projection, 12, width) or [torch.nn.Identity()]
            # Behind the map comes Normalize.
            torch.testing.assert_close(normalize(cut(rows)), normalize(vectors[:, :width]))
