"""Two ways of training over seeds: paired differences, their bootstrap interval and an exact sign-flip test."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from capt.pretrain.base.paired import paired_difference, sign_flip_p

RESAMPLES = 10_000
STATISTICS = ("95% bootstrap over seeds", "seeds in which it is above 0", "p, sign flips")


class Paired(NamedTuple):
    """``first - second`` over the seeds that both have.

    Attributes:
        mean: of the differences.
        low: of the 95% bootstrap interval of the mean.
        high: likewise.
        wins: seeds in which the first is better.
        seeds: how many there are.
        p: two-sided, over all 2^n ways to flip the signs of the differences; with five seeds it is 0.0625 at least.
    """

    mean: float
    low: float
    high: float
    wins: int
    seeds: int
    p: float

    def cells(self, digits: int = 1, scale: float = 1.0) -> list[str]:
        """The cells of a table: the mean, and what `STATISTICS` names; mean and interval times ``scale``."""
        mean, low, high = (f"{scale * value:+.{digits}f}" for value in self[:3])
        interval = f"{low} to {high}" if self.seeds > 1 else "none"
        return [mean, interval, f"{self.wins} of {self.seeds}", f"{self.p:.3f}"]


def paired(first: Mapping[int, float], second: Mapping[int, float], resamples: int = RESAMPLES) -> Paired | None:
    """Compare the scores of two arms by seed; None where they share no seed.

    The interval is that of the percentile bootstrap over seeds (Efron 1979), none of one seed. With five seeds it is
    too narrow rather than too wide, so the exact test is beside it.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    differences = np.array([first[seed] - second[seed] for seed in seeds])
    draws = np.random.default_rng(0).integers(0, len(seeds), (resamples, len(seeds)))
    low, high = np.percentile(differences[draws].mean(1), [2.5, 97.5])
    return Paired(
        float(differences.mean()), float(low), float(high), int((differences > 0).sum()), len(seeds),
        sign_flip_p(differences),
    )  # fmt: skip


def mean_and_sd(scores: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1), None for a single score."""
    return statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else None


def spread(scores: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean ± standard deviation, both times ``scale``, as a cell of a table."""
    mean, deviation = mean_and_sd(scores)
    return f"{scale * mean:.{digits}f}" + ("" if deviation is None else f" ± {scale * deviation:.{digits}f}")


def clustered_error(correct: Mapping[str, Sequence[float]]) -> float:
    """Standard error of the mean over all rows, where the rows of a group (one sentence) are not independent.

    The sandwich estimate for the mean of clustered rows: sqrt(g/(g-1) sum_g (sum_i (x_gi - mean))^2) / n.
    """
    rows = [value for group in correct.values() for value in group]
    mean = statistics.fmean(rows)
    groups = len(correct)
    residuals = [sum(value - mean for value in group) for group in correct.values()]
    return float((groups / (groups - 1) * sum(r * r for r in residuals)) ** 0.5 / len(rows))


def mean_interval(values: Sequence[float], sign: str = "+") -> str:
    """Mean of a value of each seed, and its interval by Student's t where there are several that differ."""
    found = paired_difference([0.0] * len(values), values)
    reach = "" if found.low is None else f" [{found.low:{sign}.1f}, {found.high:{sign}.1f}]"
    return f"{found.difference:{sign}.1f}{reach}"


def seeds_compared(differences: Sequence[float]) -> str:
    """The same of differences, and in how many seeds they are above 0."""
    return f"{mean_interval(differences)}, {sum(each > 0 for each in differences)} of {len(differences)}"
