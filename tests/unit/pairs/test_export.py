"""The linear map that leaves the first columns of a model of pairs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from capt.pretrain.pairs.export import one_limit, projections


def test_a_cut_model_has_the_first_columns_as_unit_rows() -> None:
    rows = torch.randn(5, 12)
    for projection in (None, torch.nn.Linear(12, 9), torch.nn.Linear(12, 9, bias=False)):
        vectors = rows if projection is None else projection(rows)
        for width in (1, 4, 9, None):
            (cut,) = projections(projection, 12, width) or [torch.nn.Identity()]
            # Behind the map comes Normalize.
            torch.testing.assert_close(normalize(cut(rows)), normalize(vectors[:, :width]))


def test_an_export_has_the_longer_limit_of_both_sides_and_says_where_they_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert one_limit(32, 32) == 32
    assert not caplog.records
    assert (one_limit(8, 32), one_limit(32, 8)) == (32, 32)
    assert (
        "queries were cut to 8 tokens and documents to 32, prompts included; the folder has one limit, 32"
        in caplog.text
    )
