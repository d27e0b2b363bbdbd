"""Paired comparison: by how much two systems differ on the same queries or seeds, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ENUMERATED = 20
"""Differences other than 0 up to which all sign flips are enumerated, a million sums."""
_TIE = 1e-12
"""Sums that differ by less than this share of the largest one possible are equal: rounding of another order."""
_AT_ONCE = 1 << 22


class Paired(NamedTuple):
    """The mean of paired differences.

    Attributes:
        difference: the mean.
        low: of the 95% interval of Student's t; None where nothing tells the spread: of one difference, or equal ones.
        high: likewise.
        p: two-sided, of the sign-flip test.
        least_p: the smallest that differences of this number can have.
    """

    difference: float
    low: float | None
    high: float | None
    p: float
    least_p: float


def paired_difference(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray, *, draws: int = 10_000, seed: int = 1
) -> Paired:
    """Compare ``second`` with ``first``, measured on the same ``n`` queries or seeds.

    Under the null hypothesis each difference has either sign. The p is the share of all :math:`2^n` ways to flip signs
    whose mean is as far from 0 as the one measured, so never below :math:`2 / 2^n` (Fisher's randomization test). More
    than `_ENUMERATED` are drawn ``draws`` times, with one more for the measured one: :math:`(1 + h) / (1 + draws)`.
    Student's t interval assumes that the mean of the differences is about normal, and is wide where they are few.
    """
    a, b = (np.asarray(values, dtype=np.float64) for values in (first, second))
    if not np.isfinite([a, b]).all():
        raise ValueError("figures that are compared must be finite numbers")
    # Less than this is the rounding of figures that are equal.
    rounding = _TIE * max(np.abs(a).max(), np.abs(b).max())
    differences = np.where(np.abs(b - a) > rounding, b - a, 0.0)
    n, mean = len(differences), float(differences.mean())
    low = high = None
    if n > 1 and np.ptp(differences) > rounding:
        from scipy.stats import t

        reach = float(t.ppf(0.975, n - 1) * differences.std(ddof=1) / np.sqrt(n))
        low, high = mean - reach, mean + reach
    return Paired(mean, low, high, sign_flip_p(differences, draws=draws, seed=seed), 2.0 ** (1 - n))


def sign_flip_p(differences: Sequence[float] | np.ndarray, *, draws: int = 10_000, seed: int = 1) -> float:
    """The two-sided p of the sign-flip test; see `paired_difference`."""
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]  # a 0 has no sign: its flips are the same sums twice
    limit = abs(values.sum()) - _TIE * np.abs(values).sum()
    if len(values) <= _ENUMERATED:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= limit).mean())
    generator, hits = np.random.default_rng(seed), 0
    step = max(1, _AT_ONCE // len(values))
    for start in range(0, draws, step):
        signs = generator.integers(0, 2, size=(min(step, draws - start), len(values)), dtype=np.int8)
        hits += int((np.abs(signs @ (2 * values) - values.sum()) >= limit).sum())
    return max((1 + hits) / (1 + draws), 2.0 ** (1 - len(values)))
