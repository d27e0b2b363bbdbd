"""Fusion of rankings by reciprocal ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T", bound=Hashable)

FUSION_K = 60
"""The constant of the paper, by which first ranks count little more than the next ones."""


def reciprocal_ranks(rankings: Sequence[Sequence[T]], place: Callable[[T], Any]) -> list[tuple[T, float]]:
    r"""Fuse rankings of documents by reciprocal ranks (Cormack, Clarke and Büttcher 2009), the best first.

    .. math:: s(d) = \sum_{r} \frac{1}{60 + \mathrm{rank}_r(d)}

    over the rankings that hold the document, whose ranks begin with 1. Sums are rounded to fp32, as trec_eval holds
    scores.

    Args:
        rankings: documents, the best first, each once.
        place: the order of documents with equal scores: the smallest comes first.
    """
    sums: dict[T, float] = {}
    for ranking in rankings:
        for rank, document in enumerate(ranking, start=1):
            sums[document] = sums.get(document, 0.0) + 1 / (FUSION_K + rank)
    scores = {document: float(np.float32(total)) for document, total in sums.items()}
    return sorted(scores.items(), key=lambda each: (-each[1], place(each[0])))
