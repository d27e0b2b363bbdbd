"""The figures are trec_eval's."""

from __future__ import annotations

import random

import numpy as np
import pytest

from capt.pretrain.config.retrieval import METRICS
from capt.pretrain.retrieval.metrics import DEPTH, mean_metrics, query_metrics

_TREC = {
    "ndcg@10": "ndcg_cut_10", "mrr@10": "recip_rank", "recall@1": "recall_1", "recall@10": "recall_10",
    "recall@100": "recall_100", "map@100": "map",
}  # fmt: skip


def test_the_figures_are_those_of_trec_eval() -> None:
    """Random runs with ties, documents without a judgement, judged ones that were not found, and grades."""
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pytrec-eval-terrier is not installed")
    generator = random.Random(3)
    runs: dict[str, dict[str, float]] = {}
    judged: dict[str, dict[str, int]] = {}
    for query in range(300):
        found = generator.randint(1, DEPTH)
        names = generator.sample([f"d{i}" for i in range(150)], found)
        levels = generator.choice([2, 5, 1000])
        runs[f"q{query}"] = {name: generator.randrange(levels) / levels for name in names}
        grades = generator.choice([(0, 1), (0, 1, 2, 3), (-1, 0, 1), (0,)])
        pool = [*names, *(f"missing{i}" for i in range(5))]
        some = generator.sample(pool, min(len(pool), generator.randint(1, 20)))
        judged[f"q{query}"] = {name: generator.choice(grades) for name in some}
    theirs = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.10", "recip_rank", "recall.1,10,100", "map"}).evaluate(
        runs
    )
    tied = 0
    for query, scores in runs.items():
        # descending by score, then by id: trec_eval's order
        ranking = sorted(sorted(scores, reverse=True), key=lambda name: -scores[name])
        tied += len(set(scores.values())) < len(scores)
        ours = query_metrics(ranking, judged[query])
        for name in METRICS:
            expected = theirs[query][_TREC[name]]
            if name == "mrr@10" and expected < 1 / 10 - 1e-12:  # theirs looks at the whole ranking
                expected = 0.0
            assert abs(ours[name] - expected) < 1e-9, (query, name)
    assert tied > 50


def test_a_ranking_by_hand() -> None:
    figures = query_metrics(["a", "b", "c"], {"b": 3, "c": 1, "z": 2})
    gain = 3 / np.log2(3) + 1 / 2
    ideal = 3 + 2 / np.log2(3) + 1 / 2
    assert figures["ndcg@10"] == pytest.approx(gain / ideal, abs=1e-12)
    assert figures["mrr@10"] == 0.5
    assert (figures["recall@1"], figures["recall@10"]) == (0, 2 / 3)
    assert figures["map@100"] == pytest.approx((1 / 2 + 2 / 3) / 3)
    assert mean_metrics([]) == dict.fromkeys(METRICS)
