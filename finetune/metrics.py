"""Metrics of classes and scores as scikit-learn and scipy compute them, kept finite."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Num
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from capt.pretrain.base.errors import ConfigError

Labels = Num[np.ndarray, " _"]


def compute_metrics(names: Sequence[str], predictions: Labels, labels: Labels) -> dict[str, float]:
    """The metrics ``names`` of ``predictions`` (classes, or scores), each in [-1, 1] and never nan.

    Beside them ``degenerate`` is 1 where the predictions are constant (a correlation, then undefined, counts as 0), and
    ``baseline`` is the first metric of the best constant prediction: a score no better means that training failed.

    Raises:
        ConfigError: a metric is unknown.
        ValueError: there are no rows, or the numbers of predictions and labels differ.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError(f"unknown metric {unknown[0]!r}; known: {', '.join(METRICS)}")
    if len(predictions) != len(labels) or not len(labels):
        raise ValueError(f"{len(predictions)} predictions for {len(labels)} labels")
    result = {name: METRICS[name](predictions, labels) for name in names}
    return {
        **result,
        "degenerate": float(is_degenerate(predictions)),
        "baseline": METRICS[names[0]](best_constant(labels), labels),
    }


def is_degenerate(predictions: Labels) -> bool:
    """Whether every prediction is the same; for scores: up to a thousandth of STS-B's scale.

    A regression that has collapsed predicts the mean label with the noise of its arithmetic (2.84 for STS-B).
    """
    spread = float(np.ptp(predictions))
    return spread == 0 if np.issubdtype(predictions.dtype, np.integer) else not spread > 5e-3


def best_constant(labels: Labels) -> Labels:
    """The best constant prediction: the most frequent class (the lowest of several), or the mean score."""
    if np.issubdtype(labels.dtype, np.integer):
        classes, counts = np.unique(labels, return_counts=True)
        return np.full_like(labels, classes[counts.argmax()])
    return np.full_like(labels, labels.mean())


def _accuracy(predictions: Labels, labels: Labels) -> float:
    return float(accuracy_score(labels, predictions))


def _f1(predictions: Labels, labels: Labels) -> float:
    return float(f1_score(labels, predictions, zero_division=0))


def _matthews(predictions: Labels, labels: Labels) -> float:
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:  # 0 by convention; scikit-learn says so with a warning
        return 0.0
    return float(matthews_corrcoef(labels, predictions))


def _pearson(predictions: Labels, labels: Labels) -> float:
    return _correlation(pearsonr, predictions, labels)


def _spearman(predictions: Labels, labels: Labels) -> float:
    return _correlation(spearmanr, predictions, labels)


def _correlation(function: Callable[..., tuple[float, float]], predictions: Labels, labels: Labels) -> float:
    if len(labels) < 2 or np.ptp(predictions) == 0 or np.ptp(labels) == 0 or not np.isfinite(predictions).all():
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly constant input: said by ``degenerate``
        value = float(function(predictions.astype(np.float64), labels.astype(np.float64))[0])
    return value if np.isfinite(value) else 0.0


METRICS: dict[str, Callable[[Labels, Labels], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}
