"""The statistics of the studies: paired differences over seeds, and errors over groups of rows."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from tests.studies.seeds import clustered_error, mean_and_sd, paired
from tests.studies.vision_language_tables import Trial, arms_table, differences_table


def test_differences_are_paired_by_seed() -> None:
    first, second = {1: 0.5, 2: 0.7, 3: 0.6, 9: 1.0}, {1: 0.4, 2: 0.5, 3: 0.7, 8: 0.0}
    result = paired(first, second)
    assert result is not None
    assert (result.wins, result.seeds) == (2, 3)
    assert result.mean == pytest.approx((0.1 + 0.2 - 0.1) / 3)
    assert result.low < result.mean < result.high
    means = sorted(sum(draw) / 3 for draw in itertools.product((0.1, 0.2, -0.1), repeat=3))
    assert result.low == pytest.approx(means[0], abs=0.04), "27 equally likely resamples"
    assert result.high == pytest.approx(means[-1], abs=0.04)
    assert paired({1: 0.5}, {2: 0.5}) is None
    assert result.p == 6 / 8, "of 8 flips two have a sum of 0"
    alone = paired({1: 0.5}, {1: 0.4})
    assert alone is not None
    assert alone.cells() == ["+0.1", "none", "1 of 1", "1.000"]


def test_rows_of_a_group_count_once() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    alone = clustered_error({str(i): [value] for i, value in enumerate(values)})
    assert alone == pytest.approx(statistics.stdev(values) / math.sqrt(5))
    copies = clustered_error({str(i): [value] * 4 for i, value in enumerate(values)})
    assert copies == pytest.approx(alone), "copies of a row say nothing new"


def test_tables() -> None:
    def trial(arm: str, seed: int, test: float) -> Trial:
        return Trial("nlvr1", "nlvr1", arm, seed, 600, 60.0, 0.6, test, 0.015, 0.2, 0.554, 985)

    trials = [trial("none", 1, 0.55), trial("none", 2, 0.57), trial("capt", 1, 0.60), trial("capt", 2, 0.66)]
    arms = arms_table(trials).splitlines()
    assert arms[2] == "| nlvr1 | none | 600 | 60 | 56.0 ± 1.4 | 55.0, 57.0 | 1.5 | 55.4 | 60.0 ± 0.0 | 20.0 ± 0.0 |"
    (row,) = differences_table(trials).splitlines()[2:]
    assert row == "| nlvr1 | capt - none | +7.0 | +5.0 to +9.0 | 2 of 2 | 0.500 |"
    assert mean_and_sd([0.5]) == (0.5, None)
