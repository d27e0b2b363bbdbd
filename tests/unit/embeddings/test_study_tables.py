"""The bootstrap over word pairs of docs/results/ace.md, against scipy and against what it must say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from capt.pretrain.embeddings.similarity import Cosines, WordPairs
from tests.studies.ace_tables import Trial, bootstrap, similarity_table

RNG = np.random.default_rng(0)
GOLD = RNG.random(150)
NAMES = tuple(f"w{i}" for i in range(150))
PAIRS = WordPairs("s", NAMES, NAMES, GOLD)


def arm(noise: float, seeds: int = 3) -> dict[int, Cosines]:
    covered = np.arange(150) < 120
    values = {seed: np.where(covered, GOLD + noise * RNG.standard_normal(150), 0) for seed in range(seeds)}
    return {seed: Cosines(PAIRS, each, covered) for seed, each in values.items()}


@pytest.mark.parametrize("rule", ["drop", "zero"])
def test_the_difference_is_that_of_the_mean_rho(rule: str) -> None:
    good, bad = arm(0.1), arm(2.0)
    n = 120 if rule == "drop" else 150
    rho = [np.mean([100 * spearmanr(c.values[:n], GOLD[:n]).statistic for c in each.values()]) for each in (good, bad)]
    result = bootstrap(good, bad, rule, resamples=200)
    assert result.difference == pytest.approx(rho[0] - rho[1])
    assert 0 < result.low < result.difference < result.high


def test_equal_arms_differ_by_nothing() -> None:
    same = arm(0.5)
    assert bootstrap(same, same, "zero", resamples=50) == (0, 0, 0)
    result = bootstrap(arm(1.0, 1), arm(1.0, 1), "drop", resamples=300)
    assert result.low < 0 < result.high  # two draws of one arm: the interval must not tell them apart


def test_a_set_that_was_not_covered_has_an_empty_cell() -> None:
    trials = [Trial("scratch", "noise", seed, "s", 10, 0, None, None, 5, 1.0) for seed in (1, 2)]
    trials += [Trial("scratch", "noise", seed, "t", 10, 4, 20.0 + seed, 1.0, 5, 1.0) for seed in (1, 2)]
    assert similarity_table(trials, "drop").splitlines()[2] == "| noise |  | 21.50 ± 0.71 |"
