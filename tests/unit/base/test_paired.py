"""The paired test is scipy's, never surer than the number of differences allows, and calibrated; so is its interval."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from capt.pretrain.base.paired import paired_difference, sign_flip_p


@pytest.mark.parametrize("n", range(1, 13))
def test_few_differences_are_tested_exactly(n: int) -> None:
    """Against scipy and a loop over all flips: of any values, of ties, of zeros and of equal ones."""
    generator = np.random.default_rng(n)
    ties = generator.integers(-2, 4, n) / 10
    for values in (generator.normal(0.5, 1, n), ties, np.full(n, 0.1), np.zeros(n), -0.3 * np.arange(n)):
        first = generator.normal(size=n).round(3)
        found = paired_difference(first, first + values)
        flipped = [
            abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in itertools.product((1, -1), repeat=n)
        ]
        assert found.p == pytest.approx(np.mean([each >= abs(values.sum()) - 1e-9 for each in flipped]))
        assert found.p >= found.least_p == 2 / 2**n
        if n > 1 and np.ptp(values):  # scipy refuses a single observation
            theirs = stats.permutation_test(
                (values,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
            )
            assert found.p == pytest.approx(min(1.0, theirs.pvalue))
            interval = stats.ttest_1samp(values, 0).confidence_interval()
            assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
            assert found.low is not None
            assert found.low < found.difference < found.high
        else:
            # Equal differences have rounding in them, which is no spread.
            assert (found.low, found.high) == (None, None)
        if n == 1 or not values.any():
            assert found.p == 1
    with pytest.raises(ValueError, match="finite"):
        paired_difference(np.zeros(n), np.full(n, np.nan))


def test_many_differences_are_drawn() -> None:
    """Near scipy's p; as small as the draws allow and never 0; zeros have no say; the same by the same seed."""
    generator = np.random.default_rng(0)
    values = generator.normal(0.2, 1, 60)
    theirs = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=20_000, rng=1).pvalue
    assert sign_flip_p(values, draws=20_000) == pytest.approx(theirs, abs=0.02)
    assert sign_flip_p(values + 3) == 1 / 10_001
    assert sign_flip_p(np.ones(21), draws=2_000_000) >= 2 / 2**21
    assert sign_flip_p(np.append(values[:18], np.zeros(500))) == sign_flip_p(values[:18])
    assert sign_flip_p(values) == sign_flip_p(values, seed=1)


@pytest.mark.parametrize("n", [4, 9, 40])
def test_without_a_difference_the_test_and_the_interval_are_calibrated(n: int) -> None:
    generator = np.random.default_rng(n)
    found = [paired_difference(np.zeros(n), generator.normal(size=n), draws=300) for _ in range(400)]
    assert sum(each.p <= 0.1 for each in found) < 60
    assert sum(each.p <= 0.25 for each in found) > 60
    inside = sum(each.low < 0 < each.high for each in found if each.low is not None and each.high is not None)
    assert 368 < inside < 394
