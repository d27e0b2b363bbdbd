"""The bootstrap over word pairs of docs/results/ace.md against scipy, and the held-out loss against a literal loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from capt.pretrain.embeddings.similarity import Cosines, WordPairs
from capt.pretrain.embeddings.vectors import WordVectors
from tests.studies.ace_tables import Trial, bootstrap, similarity_table
from tests.studies.skipgram import HeldOutLoss

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


def test_the_held_out_loss_is_that_of_a_literal_loop(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(40)]
    random = np.random.default_rng(1)
    for name in ("train.txt", "valid.txt"):
        lines = [" ".join(random.choice(words, 12)) for _ in range(200)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    held_out = HeldOutLoss(tmp_path / "train.txt", tmp_path / "valid.txt")
    order = random.permutation(40)
    matrix, context = random.normal(size=(2, 40, 6)).astype(np.float32)
    vectors = WordVectors(tuple(words[i] for i in order), matrix, context)
    row = {word: i for i, word in enumerate(vectors.words)}
    total = 0.0
    for (centre, neighbour), noise in zip(held_out._pairs[:500], held_out._noise[:500], strict=True):
        x, y = (
            table[row[held_out._words[i]]].astype(np.float64) for table, i in ((matrix, centre), (context, neighbour))
        )
        total += np.log1p(np.exp(-x @ y))
        total += sum(np.log1p(np.exp(x @ context[row[held_out._words[i]]].astype(np.float64))) for i in noise)
    held_out._pairs, held_out._noise = held_out._pairs[:500], held_out._noise[:500]
    assert held_out.of(vectors) == pytest.approx(total / 500, rel=1e-9)
