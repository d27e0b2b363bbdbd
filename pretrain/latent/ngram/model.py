"""An n-gram language model with back-off, as arrays: scores a whole text in one pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64, Int64

from capt.pretrain.base.errors import DataError

# Log probabilities of the words of a text under a language model, and its perplexity as KenLM counts it.


Text = Sequence[Sequence[str]]
"""Sentences of words, without ``<s>`` and ``</s>``."""

_SEPARATOR = re.compile("[\0\t\n\v\f\r ]")


@dataclass(frozen=True)
class WordScores:
    """The scores of the words of a text in order, each sentence followed by its ``</s>``; ``<s>`` is context only.

    ``log10`` is log10 p(word | the words before it in its sentence). ``is_unknown`` marks words that the model was not
    trained on: they are scored as ``<unk>``. ``is_end`` marks each ``</s>``.
    """

    log10: Float64[np.ndarray, " t"]
    is_unknown: Bool[np.ndarray, " t"]
    is_end: Bool[np.ndarray, " t"]

    def perplexity(self, *, ends: bool, unknown: bool = True) -> float:
        """Compute ``10 ** -(mean log10 p)``.

        Args:
            ends: count ``</s>`` as a word, as KenLM's ``query`` does. The code released with the paper does not.
            unknown: count unknown words ("Perplexity including OOVs" of ``query``), as the paper does.

        Raises:
            DataError: nothing is left to count.
        """
        included = (ends | ~self.is_end) & (unknown | ~self.is_unknown)
        if not included.any():
            raise DataError("perplexity: the text has no word to score; a perplexity needs one or more")
        return float(10.0 ** -self.log10[included].mean())


@runtime_checkable
class LanguageModel(Protocol):
    """A model that scores a text, such as ``ngram.model.NGramModel`` and ``ngram.kenlm.KenLM``."""

    def score(self, text: Text) -> WordScores:
        """Compute the log10 probability of each word and of each end of a sentence."""


def check_words(words: Iterable[str]) -> None:
    """Check that each word can be written to text and ARPA files, which separate words by white space.

    Raises:
        DataError: a word is empty or holds white space or NUL.
    """
    for word in words:
        if not word or _SEPARATOR.search(word):
            raise DataError(f"language model: {word!r} is not one word; split sentences at white space")


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
