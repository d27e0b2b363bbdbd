"""Metrics: scikit-learn's and scipy's numbers, never nan, and the averages of the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from capt.finetune.metrics import METRICS, best_constant, compute_metrics, is_degenerate
from capt.pretrain.base.errors import ConfigError

PREDICTED = np.array([1, 0, 1, 1, 0, 1, 0, 0, 1, 1])
TRUE = np.array([1, 0, 0, 1, 0, 1, 1, 0, 1, 1])


def test_classes_against_scikit_learn_and_by_hand() -> None:
    found = compute_metrics(["matthews", "accuracy", "f1"], PREDICTED, TRUE)
    assert found["accuracy"] == pytest.approx(0.8)
    assert found["f1"] == pytest.approx(2 * 5 / (2 * 5 + 1 + 1))
    assert found["matthews"] == pytest.approx((5 * 3 - 1 * 1) / math.sqrt(6 * 6 * 4 * 4))
    assert found["matthews"] == pytest.approx(sk.matthews_corrcoef(TRUE, PREDICTED))
    assert (found["degenerate"], found["baseline"]) == (0.0, 0.0)


def test_several_labels_against_scikit_learn_and_by_hand() -> None:
    gold = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    predicted = np.array([[1, 0, 0], [1, 0, 1], [0, 0, 0], [0, 0, 0]])
    found = compute_metrics(["micro_f1", "macro_f1", "accuracy"], predicted, gold)
    assert found["micro_f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 2))
    assert found["macro_f1"] == pytest.approx((2 * 2 / (2 * 2 + 1) + 0 + 0) / 3)
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["degenerate"] == 0
    assert compute_metrics(["micro_f1"], np.zeros_like(gold), gold)["degenerate"] == 1
    macro = compute_metrics(["macro_f1"], PREDICTED + 1, TRUE * 2)["macro_f1"]
    assert macro == pytest.approx(sk.f1_score(TRUE * 2, PREDICTED + 1, average="macro"))


def test_the_best_constant_labels_are_those_of_all_subsets() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        gold = (rng.random((9, 4)) < rng.random(4)).astype(np.int64)
        subsets = (np.repeat([[i >> k & 1 for k in range(4)]], 9, axis=0) for i in range(16))
        best = max(METRICS["micro_f1"](subset, gold) for subset in subsets)
        assert METRICS["micro_f1"](best_constant(gold), gold) == pytest.approx(best)


def test_scores_against_scipy() -> None:
    rng = np.random.default_rng(0)
    gold = rng.uniform(0, 5, 200).astype(np.float32)
    predicted = np.clip(gold + rng.normal(0, 1, 200), 0, 5).astype(np.float32)
    found = compute_metrics(["pearson", "spearman"], predicted, gold)
    assert found["pearson"] == pytest.approx(stats.pearsonr(predicted.astype(float), gold.astype(float)).statistic)
    assert found["spearman"] == pytest.approx(stats.spearmanr(predicted, gold).statistic)
    assert 0.7 < found["pearson"] < 1
    assert found["degenerate"] == 0


def test_constant_predictions_give_zero_and_are_flagged() -> None:
    classes = compute_metrics(["matthews", "accuracy", "f1"], np.zeros(4, dtype=np.int64), np.array([0, 1, 0, 0]))
    expected = {"matthews": 0.0, "accuracy": 0.75, "f1": 0.0, "degenerate": 1.0, "baseline": 0.0}
    assert classes == expected
    gold = np.array([0.0, 2.0, 5.0], dtype=np.float32)
    scores = compute_metrics(["pearson", "spearman"], np.full(3, 2.84, dtype=np.float32), gold)
    assert scores == {"pearson": 0.0, "spearman": 0.0, "degenerate": 1.0, "baseline": 0.0}
    noise = np.array([2.84, 2.8401, 2.8402], dtype=np.float32)
    assert compute_metrics(["pearson"], noise, gold)["degenerate"] == 1.0
    assert compute_metrics(["accuracy"], np.array([1, 1, 1]), np.array([1, 1, 1]))["degenerate"] == 1.0


def test_nan_and_infinite_predictions_do_not_pass_for_results() -> None:
    gold = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    for bad in (np.nan, np.inf):
        found = compute_metrics(["pearson", "spearman"], np.array([1.0, bad, 3.0], dtype=np.float32), gold)
        assert (found["pearson"], found["spearman"]) == (0.0, 0.0)
    assert is_degenerate(np.array([1.0, np.nan], dtype=np.float32))


def test_the_baseline_is_the_best_constant() -> None:
    labels = np.array([2, 2, 2, 0, 1])
    assert compute_metrics(["accuracy"], np.array([2, 1, 0, 0, 1]), labels)["baseline"] == pytest.approx(0.6)
    assert list(best_constant(np.array([0, 1]))) == [0, 0]
    assert list(best_constant(np.array([1.0, 4.0]))) == [2.5, 2.5]


def test_bad_calls() -> None:
    with pytest.raises(ConfigError, match="unknown metric 'accurracy'; known: accuracy, f1, macro_f1, matthews"):
        compute_metrics(["accurracy"], PREDICTED, TRUE)
    with pytest.raises(ValueError, match="2 predictions for 10 labels"):
        compute_metrics(["accuracy"], PREDICTED[:2], TRUE)
    with pytest.raises(ValueError, match="0 predictions for 0 labels"):
        compute_metrics(["accuracy"], PREDICTED[:0], TRUE[:0])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30))
def test_classes_always_give_numbers(rows: list[tuple[int, int]]) -> None:
    predicted, true = (np.array(column) for column in zip(*rows, strict=True))
    found = compute_metrics(["matthews", "accuracy", "f1"], predicted, true)
    assert all(-1 <= value <= 1 for value in found.values())
    assert found["degenerate"] == (len(set(predicted.tolist())) == 1)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=30))
def test_scores_always_give_numbers(rows: list[tuple[float, float]]) -> None:
    predicted, true = (np.array(column) for column in zip(*rows, strict=True))
    found = compute_metrics(["pearson", "spearman"], predicted, true)
    assert all(-1.000001 <= value <= 1.000001 for value in found.values())


def test_every_metric_has_a_name_that_says_higher_is_better() -> None:
    from capt.pretrain.engine.judgement import direction

    assert [direction(name) for name in METRICS] == [1] * len(METRICS)
