"""Semantic textual similarity by the SimCSE protocol (Gao et al. 2021): Spearman's rho of cosine and human scores.

One correlation over all pairs of a set ("all" in SentEval's terms), never a mean over its subsets; STS-B by plain
cosine, not by SentEval's regression. The sets are read by `capt.pretrain.data.sts_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch.nn import functional as F

from capt.pretrain.base.errors import DataError
from capt.pretrain.contrast.metrics import alignment, uniformity
from capt.pretrain.data.sts_files import Pairs
from capt.pretrain.engine.evaluations import Figures

StsEncoder = Callable[[list[str]], np.ndarray]
"""Any encoder: n texts to an ``(n, d)`` array."""


def encode_texts(texts: Sequence[str], encoder: StsEncoder, batch: int) -> Float[np.ndarray, "n d"]:
    """Encode each text as a row of float64. Distinct texts are encoded once, in batches of similar length.

    Raises:
        DataError: a row is not finite.
        ValueError: the encoder returned another number of rows.
    """
    order = sorted(set(texts), key=lambda text: (len(text.split()), text))
    parts = []
    for start in range(0, len(order), batch):
        chunk = order[start : start + batch]
        rows = np.asarray(encoder(chunk), dtype=np.float64)
        if rows.ndim != 2 or len(rows) != len(chunk):
            raise ValueError(f"the encoder returned shape {rows.shape} for {len(chunk)} texts; expected a row each")
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            raise DataError(f"the encoder returned a vector that is not finite for {chunk[int(finite.argmin())]!r}")
        parts.append(rows)
    place = {text: row for row, text in enumerate(order)}
    return np.concatenate(parts)[[place[text] for text in texts]]


def score(pairs: Pairs, encoder: StsEncoder, batch: int = 64) -> dict[str, float]:
    """`score_rows` of what ``encoder`` makes of the sentences, ``batch`` of them at a time."""
    return score_rows(pairs, encode_texts([*pairs.first, *pairs.second], encoder, batch))


@lru_cache(maxsize=16)  # a set is scored before and after a run
def word_figures(pairs: Pairs) -> Figures:
    """Compute the figures of word counts, without any model: ``spearman/tf-idf`` and ``spearman/word-counts``.

    Cosines of scikit-learn's TF-IDF (its idf is that of the distinct sentences of the set) and of plain counts;
    words are runs of letters, digits and underscores, in lower case. A sentence without a word has cosine 0 with all.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
    from sklearn.preprocessing import normalize

    figures: Figures = {}
    for name, kind in (("tf-idf", TfidfVectorizer), ("word-counts", CountVectorizer)):
        vectorizer = kind(token_pattern=r"(?u)\b\w+\b")
        try:
            vectorizer.fit(list(dict.fromkeys([*pairs.first, *pairs.second])))
        except ValueError:  # no sentence has a word
            continue
        first, second = (normalize(vectorizer.transform(texts)) for texts in (pairs.first, pairs.second))
        cosines = np.asarray(first.multiply(second).sum(axis=1)).ravel()
        # Where all cosines are equal there is no correlation.
        if np.ptp(cosines) > 0:
            figures[f"spearman/{name}"] = float(spearmanr(cosines, pairs.gold).statistic)
    return figures


def score_rows(pairs: Pairs, rows: Float[np.ndarray, "m d"]) -> dict[str, float]:
    """``spearman`` in [-1, 1] between the cosines of the pairs and the gold scores, and ``pairs``, their number.

    With it SimCSE's ``alignment`` (on pairs with a gold score above 4; absent where there are fewer than two) and
    ``uniformity`` (over the distinct sentences of the set).

    Args:
        pairs: n pairs.
        rows: 2n vectors, of all first sentences, then of all second ones.

    Raises:
        DataError: a vector of zeros; all cosines or all scores equal, so that rho is undefined.
    """
    vectors = torch.from_numpy(rows).double()
    if not bool((vectors.norm(dim=1) > 0).all()):
        raise DataError(f"{pairs.name} {pairs.split}: the encoder returned a vector of zeros, which has no cosine")
    vectors = F.normalize(vectors, dim=1)
    first, second = vectors.split(len(pairs.gold))
    cosines = (first * second).sum(dim=1).numpy()
    if np.ptp(cosines) < 1e-12:
        raise DataError(f"{pairs.name} {pairs.split}: all cosines are {cosines[0]:.6g}; the encoder has collapsed")
    if np.ptp(pairs.gold) == 0:
        raise DataError(f"{pairs.name} {pairs.split}: every score is {pairs.gold[0]:g}, with which nothing correlates")
    result = {"spearman": float(spearmanr(cosines, pairs.gold).statistic), "pairs": float(len(pairs.gold))}
    close = torch.from_numpy(pairs.gold > 4)
    if int(close.sum()) > 1:
        result["alignment"] = alignment(first[close], second[close])
    distinct = {text: row for row, text in enumerate([*pairs.first, *pairs.second])}
    result["uniformity"] = uniformity(vectors[list(distinct.values())])
    return result
