"""Recall@1, MRR and loss over a pool, against the definition written out."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.nn.functional import normalize

from capt.pretrain.contrast.masks import KnownPairs
from capt.pretrain.pairs.validation import pool_loss, retrieval


def _by_definition(
    q: torch.Tensor, d: torch.Tensor, a: list[int], b: list[int], known: set[tuple[int, int]]
) -> tuple[float, float, float]:
    hits = ranks = loss = 0.0
    for i in range(len(q)):
        candidates = [j for j in range(len(d)) if j == i or (a[i], b[j]) not in known]
        scores = {j: float(q[i] @ d[j]) for j in candidates}
        better = sum(score > scores[i] + 1e-9 for score in scores.values())
        equal = sum(abs(score - scores[i]) <= 1e-9 for score in scores.values())
        hits += (better == 0) / equal
        ranks += 1 / (better + (equal + 1) / 2)
        loss += math.log(sum(math.exp((score - scores[i]) / 0.1) for score in scores.values()))
    return hits / len(q), ranks / len(q), loss / len(q)


@pytest.mark.parametrize("seed", range(8))
def test_figures_are_those_of_the_definition(seed: int) -> None:
    generator = random.Random(seed)
    n = generator.randint(2, 40)
    torch.manual_seed(seed)
    q, d = (normalize(torch.randn(n, 3, dtype=torch.float64), dim=1) for _ in range(2))
    if seed % 2:
        d[: n // 2] = d[0]  # equal rows
    a, b = ([generator.randrange(2 * n) for _ in range(n)] for _ in range(2))
    pairs = {*zip(a, b, strict=True), *((generator.choice(a), generator.choice(b)) for _ in range(n // 2))}
    known = KnownPairs.of(torch.tensor(a), torch.tensor(b), torch.tensor(sorted(pairs)))
    found = retrieval(q, d, known)
    recall, mrr, loss = _by_definition(q, d, a, b, pairs)
    assert found["recall"] == pytest.approx(recall)
    assert found["mrr"] == pytest.approx(mrr)
    assert pool_loss(q, d, known, temperature=0.1) == pytest.approx(loss)


def test_a_collapsed_encoder_scores_chance() -> None:
    rows = normalize(torch.ones(10, 4, dtype=torch.float64), dim=1)
    ids = torch.arange(10)
    found = retrieval(rows, rows, KnownPairs.of(ids, ids, torch.stack([ids, ids], 1)))
    assert found["recall"] == pytest.approx(0.1)
    assert found["mrr"] == pytest.approx(1 / 5.5)
