"""The tables of the study of mining are those of whatever rows there are."""

from __future__ import annotations

from capt.pretrain.config.retrieval import METRICS
from tests.studies.mining import Trial, arms_table, differences_table


def test_any_rows_make_tables() -> None:
    rows = [("bm25", 1, 0.35), ("pairs", 1, 0.2), ("pairs", 2, 0.22), ("mined", 1, 0.23), ("mined", 2, 0.24)]
    trials = [Trial(arm, seed, (value,) * len(METRICS)) for arm, seed, value in rows]
    assert "| `pairs` | 2 | 21.00 ± 1.41 |" in arms_table(trials)
    differences = differences_table(trials)
    assert "| `mined` - `pairs` | +2.50 |" in differences
    assert "2 of 2" in differences
    assert "`mined` - `longer`" not in differences
