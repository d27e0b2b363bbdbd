"""The nearest words of a word by cosine, at any ranks (Table 1 of the paper shows 1-5 and 45-50)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.base.errors import ConfigError, DataError, did_you_mean, shown
from pretrain.embeddings.vectors.word_vectors import WordVectors


@dataclass(frozen=True)
class Neighbor:
    """A word near another one: its rank (1 is the nearest) and its cosine."""

    rank: int
    word: str
    cosine: float


def read_ranks(text: str) -> range:
    """Read ``45-50``, both ends included. Raises ``ConfigError`` unless it is two ranks in order, from 1 on."""
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"ranks {shown(text)}: expected FIRST-LAST, such as 45-50")
    return range(int(match[1]), int(match[2]) + 1)


def find_row(vectors: WordVectors, word: str) -> int:
    """Return the row of a word (`WordVectors.find`). Raises ``DataError`` with a near word where it has none."""
    row = vectors.find(word)
    if row is None:
        near = did_you_mean(word, vectors.words[:50_000], "")
        hint = f"; {near}" if near.startswith("did") else ""
        raise DataError(f"no vector for {shown(word)} among {len(vectors):,} words{hint}")
    return row


def neighbors(vectors: WordVectors, word: str, ranks: Sequence[range]) -> list[list[Neighbor]]:
    """Return the neighbours of a word at each range of ranks, by falling cosine; the word itself is none of them.

    Ties are in the order of the vectors. A zero vector has cosine 0 with every other. Ranks beyond the last word are
    left out.

    Raises:
        DataError: the word has no vector.
    """
    row = find_row(vectors, word)
    cosines = vectors.cosines_to(row)
    cosines[row] = -np.inf
    last = min(max(wanted.stop - 1 for wanted in ranks), len(vectors) - 1)
    order = np.argsort(-cosines, kind="stable")[:last]
    return [
        [
            Neighbor(rank, vectors.words[order[rank - 1]], float(cosines[order[rank - 1]]))
            for rank in wanted
            if rank <= last
        ]
        for wanted in ranks
    ]
