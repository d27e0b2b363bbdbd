"""The bootstrap over examples, pretraining runs and fine-tuning seeds: against its equations, and what it covers."""

from __future__ import annotations

import numpy as np
import pytest

from capt.finetune.metrics import METRICS
from tests.studies.resampling import SCORES, accuracy, over_examples, over_runs_and_examples

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores_are_those_of_fine_tuning(name: str) -> None:
    classes = name in ("accuracy", "matthews")
    labels = RNG.integers(0, 2, 80) if classes else RNG.random(80).round(1) * 5
    rows = RNG.integers(0, 2, (2, 3, 80)) if classes else (labels + RNG.standard_normal((2, 3, 80))).round(1)
    rows[1, 2] = rows[1, 2, 0]  # a constant prediction
    expected = [[METRICS[name](row, labels) for row in run] for run in rows]
    assert SCORES[name](rows, labels) == pytest.approx(np.array(expected), abs=1e-12)


def arm(shares: list[list[float]], n: int = 400) -> np.ndarray:
    """Predictions of class 1 in these shares of the examples, for labels that are all 1."""
    return np.stack([np.stack([(RNG.random(n) < share).astype(int) for share in run]) for run in shares])


def test_examples_alone_give_the_error_of_a_proportion() -> None:
    labels = np.ones(400, dtype=int)
    first, second = arm([[0.8]]), np.zeros((1, 1, 400), dtype=int)
    result = over_examples(first, second, labels, accuracy, resamples=4000)
    share = first.mean()
    assert result.difference == pytest.approx(share)
    error = np.sqrt(share * (1 - share) / 400)
    assert (result.high - result.low) / 2 == pytest.approx(1.96 * error, rel=0.06)


def test_runs_widen_the_interval() -> None:
    labels = np.ones(400, dtype=int)
    first, second = arm([[0.9, 0.9], [0.6, 0.6], [0.75, 0.75]]), arm([[0.7, 0.7]] * 3)
    alone = over_examples(first, second, labels, accuracy, resamples=1000)
    both = over_runs_and_examples(first, second, labels, accuracy, resamples=1000)
    assert both.difference == pytest.approx(alone.difference)
    assert both.high - both.low > 2 * (alone.high - alone.low), "runs that differ by 0.3 must show"


def test_runs_and_seeds_are_paired() -> None:
    labels = np.ones(400, dtype=int)
    same = arm([[0.9, 0.5], [0.6, 0.3]])
    assert over_runs_and_examples(same, same, labels, accuracy, resamples=50) == (0, 0, 0)
    better = same.copy()
    better[..., :20] = 1 - better[..., :20]
    moved = over_runs_and_examples(better, same, labels, accuracy, resamples=500)
    loose = over_runs_and_examples(better, same[:, ::-1], labels, accuracy, resamples=500)
    assert moved.high - moved.low < loose.high - loose.low


def test_arms_of_other_runs_are_refused() -> None:
    labels = np.ones(400, dtype=int)
    with pytest.raises(ValueError, match="do not pair"):
        over_runs_and_examples(arm([[0.5]]), arm([[0.5], [0.5]]), labels, accuracy)
