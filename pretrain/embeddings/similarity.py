"""Word similarity: the rank correlation of cosines with what people said, by both rules for unknown words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import spearmanr

from pretrain.base.errors import DataError
from pretrain.embeddings.similarity_sets import WordPairs
from pretrain.embeddings.vectors.word_vectors import WordVectors

CASE_RULE = "a word is looked up as it is written, and in lower case where the vectors do not have it"
"""How letters of upper case are treated, said with every result."""

RULES = {
    "drop": "pairs with an unknown word are left out",
    "zero": "pairs with an unknown word have cosine 0",
}
"""The two rules for unknown words. Which one a published number used is often not said, and it decides the number."""


@dataclass(frozen=True)
class SetResult:
    """Spearman's rho times 100 of one set.

    Attributes:
        name: the set.
        pairs: its pairs.
        covered: those whose words both have vectors.
        words: its distinct words.
        known: those that have vectors.
        drop: rho of the covered pairs; None where it is not defined: under two pairs, or no two cosines differ.
        zero: rho of all pairs, with cosine 0 for those that are not covered; None as above.
    """

    name: str
    pairs: int
    covered: int
    words: int
    known: int
    drop: float | None
    zero: float | None


@dataclass(frozen=True)
class Cosines:
    """The cosine of every pair of a set, 0 where a word is unknown, and which pairs are covered."""

    pairs: WordPairs
    values: Float[np.ndarray, " n"]
    covered: Bool[np.ndarray, " n"]


def cosines_of(vectors: WordVectors, pairs: WordPairs) -> Cosines:
    """Look up the words of a set (`CASE_RULE`) and take their cosines."""
    rows = [(vectors.find(a), vectors.find(b)) for a, b in zip(pairs.first, pairs.second, strict=True)]
    covered = np.array([a is not None and b is not None for a, b in rows])
    found = [(a, b) for a, b in rows if a is not None and b is not None]
    values = np.zeros(len(pairs))
    values[covered] = vectors.cosines([a for a, _ in found], [b for _, b in found])
    return Cosines(pairs, values, covered)


def spearman(values: Float[np.ndarray, " n"], gold: Float[np.ndarray, " n"]) -> float | None:
    """Return Spearman's rank correlation times 100, ties at their mean rank; None where it is not defined."""
    if len(values) < 2 or np.ptp(values) == 0 or np.ptp(gold) == 0:
        return None
    return 100 * float(spearmanr(values, gold).statistic)


def score_set(vectors: WordVectors, pairs: WordPairs) -> SetResult:
    """Score vectors on one set by both rules."""
    cosines = cosines_of(vectors, pairs)
    words = {*pairs.first, *pairs.second}
    return SetResult(
        pairs.name, len(pairs), int(cosines.covered.sum()), len(words),
        sum(vectors.find(word) is not None for word in words),
        drop=spearman(cosines.values[cosines.covered], pairs.gold[cosines.covered]),
        zero=spearman(cosines.values, pairs.gold) if cosines.covered.any() else None,
    )  # fmt: skip


def score_sets(vectors: WordVectors, sets: Sequence[WordPairs]) -> dict[str, dict[str, Any]]:
    """Score vectors on every set, by its name.

    Raises:
        DataError: no pair of any set has vectors for both words, or two sets have one name.
    """
    results = [score_set(vectors, pairs) for pairs in sets]
    names = [result.name for result in results]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two files of word pairs are both called {twice}: rename one")
    if not any(result.covered for result in results):
        raise DataError(
            f"none of the {sum(len(pairs) for pairs in sets):,} word pairs has vectors for both words "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}; {len(vectors):,} words have vectors): "
            "nothing can be measured"
        )
    return {result.name: {key: value for key, value in asdict(result).items() if key != "name"} for result in results}
