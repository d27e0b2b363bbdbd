"""What a trained generator draws as negatives of a word: the most probable, and some that were drawn (Table 3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from pretrain.base.randomness import generator_for
from pretrain.embeddings.neighbors import find_row
from pretrain.embeddings.restore import GENERATOR, load_tables
from pretrain.embeddings.vectors.word_vectors import WordVectors


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
