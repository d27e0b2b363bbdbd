"""An n-gram language model with back-off, as arrays: scores a whole text in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from pretrain.latent.ngram.word_scores import Text, WordScores

UNKNOWN, START, END = range(3)
SPECIAL = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True)
class Level:
    """The n-grams of one order. A row is one n-gram; rows are sorted by ``keys``.

    ``keys`` is ``prefix * V + word``, where ``prefix`` is the row of the n-gram without its last word, one level below
    (0 for unigrams, whose row is the word's number). ``log10`` is log10 p(word | prefix), ``backoff`` the log10 weight
    of the lower order where the n-gram is a context (0 where it is none).
    """

    keys: Int64[np.ndarray, " m"]
    log10: Float64[np.ndarray, " m"]
    backoff: Float64[np.ndarray, " m"]

    def find(self, keys: Int64[np.ndarray, " t"]) -> Int64[np.ndarray, " t"]:
        """Return the rows of ``keys``, and -1 for each key that is not there."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        rows = np.searchsorted(self.keys, keys)
        present = self.keys[np.minimum(rows, len(self.keys) - 1)] == keys
        return np.where(present, rows, -1)


class NGramModel:
    """The model p(w | context) = p(longest stored n-gram) x the back-off weights of the longer contexts.

    This is the lookup of ARPA files (and of KenLM): every prefix and suffix of a stored n-gram is stored as well.

    Args:
        words: all words, numbered by their places; ``<unk> <s> </s>`` are 0, 1 and 2.
        levels: the n-grams of each order, unigrams first.
    """

    def __init__(self, words: Sequence[str], levels: Sequence[Level]) -> None:
        assert tuple(words[:3]) == SPECIAL
        assert len(levels[0].keys) == len(words)
        self.words = tuple(words)
        self.levels = tuple(levels)
        self._numbers = {word: number for number, word in enumerate(words)}

    @property
    def order(self) -> int:
        """The length of the longest n-grams."""
        return len(self.levels)

    def score(self, text: Text) -> WordScores:
        """Compute the log10 probability of each word and of each end of a sentence."""
        tokens = self._framed(text)
        starts = np.concatenate(([0], np.cumsum([len(sentence) + 2 for sentence in text])[:-1])).astype(np.int64)
        rows, log10 = tokens, self.levels[0].log10[tokens]
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            contexts = np.concatenate(([-1], rows[:-1]))
            known = contexts >= 0
            rows = np.where(known, level.find(contexts * len(self.words) + tokens), -1)
            rows[starts] = -1  # nothing reaches over the start of a sentence
            listed = rows >= 0
            log10[known] += below.backoff[contexts[known]]
            log10[listed] = level.log10[rows[listed]]
        scored = np.ones(len(tokens), dtype=bool)
        scored[starts] = False
        ends = np.zeros(len(tokens), dtype=bool)
        ends[np.concatenate((starts[1:], [len(tokens)])) - 1] = True
        return WordScores(log10[scored], tokens[scored] == UNKNOWN, ends[scored])

    def _framed(self, text: Text) -> Int64[np.ndarray, " t"]:
        """Join all sentences, with ``<s>`` and ``</s>`` around each."""
        tokens: list[int] = []
        for sentence in text:
            tokens.append(START)
            tokens.extend([self._numbers.get(word, UNKNOWN) for word in sentence])
            tokens.append(END)
        return np.array(tokens, dtype=np.int64)
