"""Figures of a ranking, query by query, as trec_eval computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from capt.pretrain.config.retrieval import METRICS

DEPTH = 100
"""Documents of a ranking that are looked at."""

PROTOCOL = (
    "nDCG@10 with linear gains (the judgement itself, not 2^judgement - 1), MRR@10, Recall@1/10/100 and MAP@100 as "
    "trec_eval; equal scores ordered by document id, descending; a judgement above 0 is relevant"
)


def query_metrics(ranking: Sequence[str], judged: Mapping[str, int | float]) -> dict[str, float]:
    r"""The figures of one query.

    .. math:: \mathrm{nDCG@10} = \frac{\sum_{i=1}^{10} g_i / \log_2(i + 1)}{\sum_{i=1}^{10} g^*_i / \log_2(i + 1)}

    with gains :math:`g_i = \max(0, \text{judgement})`, zero without one, and :math:`g^*` the judgements in descending
    order. Documents without a judgement are not relevant. A query without relevant documents has zeros.

    Args:
        ranking: ids of the documents found, the best first.
        judged: the judgement of each document that has one.
    """
    gains = [max(0, judged.get(name, 0)) for name in ranking[:DEPTH]]
    ideal = sorted((gain for gain in judged.values() if gain > 0), reverse=True)
    relevant = len(ideal)
    if not relevant:
        return dict.fromkeys(METRICS, 0.0)
    hits = [position for position, gain in enumerate(gains, start=1) if gain > 0]
    precisions = sum(found / position for found, position in enumerate(hits, start=1))
    return {
        "ndcg@10": _discounted(gains[:10]) / _discounted(ideal[:10]),
        "mrr@10": next((1 / position for position in hits if position <= 10), 0.0),
        **{f"recall@{cut}": sum(position <= cut for position in hits) / relevant for cut in (1, 10, 100)},
        "map@100": precisions / relevant,
    }


def _discounted(gains: Sequence[int | float]) -> float:
    return sum((gain / math.log2(position + 1) for position, gain in enumerate(gains, start=1)), 0.0)


def mean_metrics(figures: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """The mean of each figure over queries; None without any query."""
    return {name: math.fsum(each[name] for each in figures) / len(figures) if figures else None for name in METRICS}
