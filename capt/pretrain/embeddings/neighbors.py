"""The nearest words of a word by cosine, at any ranks (Table 1), and what a generator draws for it (Table 3)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from capt.pretrain.base.errors import ConfigError, DataError, did_you_mean, shown
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.embeddings.load import GENERATOR, load_tables
from capt.pretrain.embeddings.vectors import WordVectors


@dataclass(frozen=True)
class WordNeighbor:
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


def neighbors(vectors: WordVectors, word: str, ranks: Sequence[range]) -> list[list[WordNeighbor]]:
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
            WordNeighbor(rank, vectors.words[order[rank - 1]], float(cosines[order[rank - 1]]))
            for rank in wanted
            if rank <= last
        ]
        for wanted in ranks
    ]


# What a trained generator draws as negatives of a word: the most probable, and some that were drawn (Table 3).


@dataclass(frozen=True)
class Negative:
    """A word that the generator may draw, and the probability with which it does."""

    word: str
    probability: float


@dataclass(frozen=True)
class WordNegatives:
    """Negatives of a word.

    Attributes:
        word: the centre word, as the vocabulary has it.
        hard: the words of the highest probability, highest first: they could be taken for true contexts.
        easy: words that were drawn from the generator, without those of ``hard``, each once.
        entropy: the entropy of the generator's distribution in nats; log V where it is uniform.
    """

    word: str
    hard: list[Negative]
    easy: list[Negative]
    entropy: float


def load_generator(path: Path) -> WordVectors:
    """Load the generator's tables of a run or a checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it was trained without a generator.
    """
    return load_tables(path, GENERATOR)


def distribution(generator: WordVectors, row: int) -> Float64[np.ndarray, " V"]:
    """Return the generator's softmax over the vocabulary for the centre word ``row``: of input[row] . context[y]."""
    assert generator.context is not None, "tables of a checkpoint"
    scores = (generator.context @ generator.matrix[row]).astype(np.float64)
    weights = np.exp(scores - scores.max())
    probabilities: Float64[np.ndarray, " V"] = weights / weights.sum()
    return probabilities


def negatives_of(generator: WordVectors, word: str, number: int, seed: int) -> WordNegatives:
    """Return ``number`` hard and at most the same number of easy negatives of a word.

    Easy negatives are drawn until there are ``number`` different ones, in at most 100 draws for each: a generator that
    has collapsed draws fewer.

    Raises:
        DataError: the word is not in the vocabulary.
    """
    row = find_row(generator, word)
    probabilities = distribution(generator, row)
    hard = np.argsort(-probabilities, kind="stable")[:number]
    uniform = generator_for("negatives", seed, 0, row).random(100 * number)
    drawn = np.minimum(np.searchsorted(np.cumsum(probabilities), uniform, side="right"), len(generator) - 1)
    easy = list(dict.fromkeys(int(other) for other in drawn if other not in set(hard.tolist())))[:number]
    positive = probabilities[probabilities > 0]

    def listed(rows: list[int]) -> list[Negative]:
        return [Negative(generator.words[other], float(probabilities[other])) for other in rows]

    return WordNegatives(generator.words[row], listed(hard.tolist()), listed(easy), float(-positive @ np.log(positive)))
