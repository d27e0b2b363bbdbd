"""Metrics of classes and scores as scikit-learn and scipy compute them, kept finite."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Num
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from capt.pretrain.base.errors import ConfigError

Labels = Num[np.ndarray, "_ ..."]
"""Classes ``[n]`` (integers), several labels a row ``[n, labels]`` (integers 0 and 1), or scores ``[n]`` (floats)."""


def compute_metrics(
    names: Sequence[str], predictions: Labels, labels: Labels, *, scale: float = 5.0
) -> dict[str, float]:
    """The metrics ``names`` of ``predictions`` (classes, labels, or scores), each in [-1, 1] and never nan.

    Beside them ``degenerate`` is 1 where the predictions are constant (a correlation, then undefined, counts as 0), and
    ``baseline`` is the first metric of the best constant prediction: a score no better means that training failed.
    Scores within a thousandth of ``scale`` (default: STS-B's) are constant.

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
        "degenerate": float(is_degenerate(predictions, scale)),
        "baseline": METRICS[names[0]](best_constant(labels), labels),
    }


def is_degenerate(predictions: Labels, scale: float = 5.0) -> bool:
    """Return whether all predictions are the same; scores may differ by a thousandth of their scale.

    A regression that has collapsed predicts the mean label with the noise of its arithmetic (2.84 for STS-B).
    """
    if np.issubdtype(predictions.dtype, np.integer):
        return bool((predictions == predictions[:1]).all())
    return not float(np.ptp(predictions)) > 1e-3 * scale


def best_constant(labels: Labels) -> Labels:
    """The best constant prediction: the most frequent class (the lowest of several), or the mean score.

    Where a row has several labels: the most frequent ones, in the number that has the best micro F1.
    """
    if labels.ndim == 2:
        counts = labels.sum(0)
        order = np.argsort(-counts, kind="stable")
        number = np.arange(1, len(counts) + 1)
        # Micro F1 (2 TP / (predicted + true)) where every row gets the k most frequent labels.
        f1 = 2 * np.cumsum(counts[order]) / (number * len(labels) + max(1, counts.sum()))
        chosen = np.zeros_like(labels[:1])
        chosen[0, order[: 1 + int(f1.argmax())]] = 1
        return np.repeat(chosen, len(labels), axis=0)
    if np.issubdtype(labels.dtype, np.integer):
        classes, counts = np.unique(labels, return_counts=True)
        return np.full_like(labels, classes[counts.argmax()])
    return np.full_like(labels, labels.mean())


def _accuracy(predictions: Labels, labels: Labels) -> float:
    return float(accuracy_score(labels, predictions))


def _f1(predictions: Labels, labels: Labels) -> float:
    return float(f1_score(labels, predictions, zero_division=0))


def _macro_f1(predictions: Labels, labels: Labels) -> float:
    return float(f1_score(labels, predictions, average="macro", zero_division=0))


def _micro_f1(predictions: Labels, labels: Labels) -> float:
    return float(f1_score(labels, predictions, average="micro", zero_division=0))


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
    "macro_f1": _macro_f1,
    "matthews": _matthews,
    "micro_f1": _micro_f1,
    "pearson": _pearson,
    "spearman": _spearman,
}
