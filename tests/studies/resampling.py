"""Bootstrap intervals for the difference of two arms that were measured on the same examples.

An arm is an array of predictions [..., examples]: one row for each run. A score turns rows of predictions and the
labels of the examples into one number for each row. Examples are drawn for both arms and all runs alike, so the
intervals are those of paired differences (Efron 1979; Efron and Tibshirani 1993, chapter 8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Num
from scipy.stats import rankdata

RESAMPLES = 2000
Rows = Num[np.ndarray, "*runs n"]
Score = Callable[[Rows, Num[np.ndarray, " n"]], np.ndarray]
"""Predictions [..., n] and labels [n] -> scores [...]."""


class Interval(NamedTuple):
    """A difference ``first - second`` with its 95% percentile bootstrap interval."""

    difference: float
    low: float
    high: float

    def cell(self, digits: int = 1) -> str:
        """The interval as a cell of a table."""
        return f"{self.low:+.{digits}f} to {self.high:+.{digits}f}"


def over_examples(
    first: Rows, second: Rows, labels: Num[np.ndarray, " n"], score: Score, resamples: int = RESAMPLES
) -> Interval:
    """Resample the examples alone: how much of a difference of the mean scores hangs on these examples."""

    def difference(chosen: np.ndarray) -> float:
        gold = labels[chosen]
        return float(score(first[..., chosen], gold).mean() - score(second[..., chosen], gold).mean())

    generator = np.random.default_rng(0)
    n = len(labels)
    draws = [difference(generator.integers(0, n, n)) for _ in range(resamples)]
    return _interval(difference(np.arange(n)), draws)


def over_runs_and_examples(
    first: Num[np.ndarray, "p f n"],
    second: Num[np.ndarray, "p f n"],
    labels: Num[np.ndarray, " n"],
    score: Score,
    resamples: int = RESAMPLES,
) -> Interval:
    """Resample pretraining runs, fine-tuning seeds within each drawn run, and examples: how much hangs on all of them.

    Run i and seed j of both arms belong together and are drawn together. With three pretraining runs one resample in
    nine holds a single run, so the interval is rather too narrow than too wide.

    Args:
        first: predictions by pretraining run, fine-tuning seed and example.
        second: likewise, of the other arm.
        labels: of the examples.
        score: see `Score`.
        resamples: how many draws.

    Raises:
        ValueError: the arms have not the same runs and examples.
    """
    if first.shape != second.shape or first.ndim != 3 or first.shape[2] != len(labels):
        raise ValueError(f"arms of {first.shape} and {second.shape} for {len(labels)} examples do not pair")
    runs, seeds, n = first.shape
    generator = np.random.default_rng(0)

    def by_run(chosen: np.ndarray) -> np.ndarray:
        gold = labels[chosen]
        difference: np.ndarray = score(first[..., chosen], gold) - score(second[..., chosen], gold)
        return difference

    draws = []
    for _ in range(resamples):
        differences = by_run(generator.integers(0, n, n))
        drawn = generator.integers(0, runs, runs)
        draws.append(float(differences[drawn[:, None], generator.integers(0, seeds, (runs, seeds))].mean()))
    return _interval(float(by_run(np.arange(n)).mean()), draws)


def _interval(difference: float, draws: list[float]) -> Interval:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(difference, float(low), float(high))


def accuracy(predictions: Rows, labels: Num[np.ndarray, " n"]) -> np.ndarray:
    """The share of predictions that equal their labels."""
    shares: np.ndarray = (predictions == labels).mean(-1)
    return shares


def matthews(predictions: Rows, labels: Num[np.ndarray, " n"]) -> np.ndarray:
    """Matthews's correlation of two classes 0 and 1, which is Pearson's; 0 where one side is constant."""
    return pearson(predictions, labels)


def pearson(predictions: Rows, labels: Num[np.ndarray, " n"]) -> np.ndarray:
    """Pearson's r; 0 where one side is constant."""
    x = predictions - predictions.mean(-1, keepdims=True, dtype=np.float64)
    y = labels - labels.mean(dtype=np.float64)
    scale = np.sqrt((x**2).sum(-1) * (y**2).sum())
    constant = (np.ptp(predictions, axis=-1) == 0) | (np.ptp(labels) == 0)
    r: np.ndarray = np.where(constant, 0.0, (x @ y) / np.where(constant, 1.0, scale))
    return r


def spearman(predictions: Rows, labels: Num[np.ndarray, " n"]) -> np.ndarray:
    """Spearman's rho; 0 where one side is constant."""
    return pearson(rankdata(predictions, axis=-1), rankdata(labels))


SCORES: Mapping[str, Score] = {
    "accuracy": accuracy,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
"""By the names of `capt.finetune.metrics.METRICS`."""
