"""n-gram language models with back-off as arrays: their modified Kneser-Ney estimation, and scores of a whole text."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64, Int64

from capt.pretrain.base.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


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
        # Places of the <s>; each sentence is framed by <s> and </s>.
        starts = np.concatenate(([0], np.cumsum([len(sentence) + 2 for sentence in text])[:-1])).astype(np.int64)
        rows, log10 = tokens, self.levels[0].log10[tokens]
        # Order by order, ``rows`` is the stored n-gram that ends at each place, -1 where none is.
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            contexts = np.concatenate(([-1], rows[:-1]))
            known = contexts >= 0
            rows = np.where(known, level.find(contexts * len(self.words) + tokens), -1)
            rows[starts] = -1  # nothing reaches over the start of a sentence
            listed = rows >= 0
            # Back off by default; a place whose longer n-gram is stored takes that probability instead.
            log10[known] += below.backoff[contexts[known]]
            log10[listed] = level.log10[rows[listed]]
        # <s> is a context and never scored.
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


# Interpolated modified Kneser-Ney estimation (Chen and Goodman 1998), with the conventions of KenLM's ``lmplz``.
#
# The conventions (Heafield et al. 2013, and the program): contexts reach back to one ``<s>``; adjusted counts of
# n-grams that begin with ``<s>`` are their plain counts; ``<s>`` itself has probability 1 and no count; ``<unk>`` has
# count 0 and gets its share of the uniform distribution that unigrams are interpolated with, over all words, ``</s>``
# and ``<unk>``; the words ``<unk>``, ``<s>`` and ``</s>`` in the text are read as white space (``--skip_symbols``);
# nothing is pruned.


FALLBACK = (0.5, 1.0, 1.5)
"""The discounts of counts 1, 2 and 3 or more that ``lmplz --discount_fallback`` takes where the estimate fails."""


@dataclass(frozen=True)
class _Counts:
    """The n-grams of one order in the rows of :class:`Level`; ``prefix`` and ``suffix`` are rows one order below.

    ``last`` is the row of the n-gram that ends at :func:`_last_place`, -1 if that would reach over a ``<s>``.
    """

    keys: Int64[np.ndarray, " m"]
    prefix: Int64[np.ndarray, " m"]
    suffix: Int64[np.ndarray, " m"]
    count: Int64[np.ndarray, " m"]
    from_start: Bool[np.ndarray, " m"]
    last: int


def estimate(text: Text, order: int = 5, fallback: tuple[float, float, float] | None = None) -> NGramModel:
    """Estimate a language model from ``text``.

    With a(g) the adjusted count of an n-gram g (its count at the highest order and after ``<s>``, else the number of
    different words seen before it) and D of :func:`discounts`,

        p(w | c) = (a(cw) - D(a(cw))) / sum_v a(cv) + gamma(c) p(w | c without its first word)
        gamma(c) = sum_v D(a(cv)) / sum_v a(cv)

    down to the uniform distribution below the unigrams.

    Args:
        text: sentences of words.
        order: the longest n-gram.
        fallback: the discounts D1, D2, D3+ for an order whose own cannot be estimated (few or artificial sentences;
            :data:`FALLBACK` is what ``lmplz --discount_fallback`` takes). None: such a text is an error.

    Raises:
        ConfigError: ``order`` is below 2, or a fallback discount is not in 0..1, 0..2, 0..3.
        DataError: no sentence; a word with white space; discounts that cannot be estimated, without ``fallback``.
    """
    check_estimate(text, order, fallback)
    words, tokens = _numbered(text)
    orders = _count(tokens, order, len(words))

    # From the unigrams up: each order is interpolated with the one below.
    levels: list[Level] = []
    uniform = np.full(1, 1.0 / (len(words) - 1))  # <s> is never predicted
    lower, contexts = uniform, 1
    for n, grams in enumerate(orders, start=1):
        adjusted = _adjusted(grams, orders[n] if n < order else None)
        # Counts of 3 and more share the discount D3+.
        discount = _discounts_of(n, grams, adjusted, fallback)[np.minimum(adjusted, 3)]
        total = np.bincount(grams.prefix, adjusted, minlength=contexts)
        left = np.bincount(grams.prefix, discount, minlength=contexts)
        # A context that nothing follows passes all its mass on to the order below.
        gamma = np.divide(left, total, out=np.ones(contexts), where=total > 0)
        p = (adjusted - discount) / total[grams.prefix] + gamma[grams.prefix] * lower[grams.suffix]
        if n == 1:
            p[START] = 1.0
        else:
            # Back-off weights belong to the contexts, which are the n-grams of the order below.
            levels[-1].backoff[:] = np.log10(gamma)
        levels.append(Level(grams.keys, np.minimum(np.log10(p), 0.0), np.zeros(len(p))))
        lower, contexts = p, len(p)
    return NGramModel(words, levels)


def check_estimate(text: Text, order: int, fallback: tuple[float, float, float] | None) -> None:
    """Check the arguments of an estimator.

    Raises:
        ConfigError: ``order`` is below 2, or a fallback discount is not in 0..1, 0..2, 0..3.
        DataError: no sentence.
    """
    if order < 2:
        raise ConfigError(f"language model: order {order}; an n-gram model needs 2 or more")
    if fallback is not None and not all(0 <= d <= k for k, d in enumerate(fallback, start=1)):
        raise ConfigError(f"language model: fallback discounts {fallback}; they must be in 0..1, 0..2 and 0..3")
    if not text:
        raise DataError("language model: no sentence to estimate from")


def discounts(adjusted: Int64[np.ndarray, " m"]) -> Float64[np.ndarray, " 4"] | None:
    """Estimate D(0) = 0, D1, D2 and D3+ of the n-grams of one order (Chen and Goodman 1998, Eq. 26), None if undefined.

    With n_k the number of n-grams whose adjusted count is k and Y = n_1 / (n_1 + 2 n_2):
    D_k = k - (k + 1) Y n_{k+1} / n_k. Not defined, as in ``lmplz``: n_1, n_2 or n_3 is 0, or a discount is negative.
    """
    n = np.bincount(np.minimum(adjusted, 5), minlength=6).astype(np.float64)
    if (n[1:4] == 0).any():
        return None
    k = np.arange(1, 4)
    d = k - (k + 1) * n[1] / (n[1] + 2 * n[2]) * n[2:5] / n[1:4]
    return None if (d < 0).any() else np.concatenate(([0.0], d))


def _discounts_of(
    n: int, grams: _Counts, adjusted: Int64[np.ndarray, " m"], fallback: tuple[float, float, float] | None
) -> Float64[np.ndarray, " 4"]:
    observed = adjusted.copy()
    if grams.last >= 0:
        # lmplz takes the last n-gram of its sort by its plain count. On PTB that alone moves log10 p(<unk>) by 0.001.
        observed[grams.last] = grams.count[grams.last]
    own = discounts(observed)
    if own is not None:
        return own
    if fallback is None:
        raise DataError(
            f"language model: {n}-gram discounts cannot be estimated: too little, or artificial text; "
            f"use more text, or the fallback discounts {FALLBACK} (lmplz --discount_fallback)"
        )
    logger.info("language model: %d-gram discounts cannot be estimated; D1 D2 D3+ = %s instead", n, fallback)
    return np.array([0.0, *fallback])


def _numbered(text: Text) -> tuple[list[str], Int64[np.ndarray, " t"]]:
    """Number the words in order of appearance; returns them, and the text ``<s> .. </s> <s> .. </s>`` in numbers."""
    numbers = {word: number for number, word in enumerate(SPECIAL)}
    tokens: list[int] = []
    for sentence in text:
        tokens.append(START)
        tokens.extend([n for word in sentence if (n := numbers.setdefault(word, len(numbers))) > END])
        tokens.append(END)
    check_words(numbers)
    return list(numbers), np.array(tokens, dtype=np.int64)


def _count(tokens: Int64[np.ndarray, " t"], order: int, vocabulary: int) -> list[_Counts]:
    """Count the n-grams of every order; none reaches over a ``<s>``."""
    ids = np.arange(vocabulary)
    nothing = np.zeros(vocabulary, dtype=np.int64)
    count = np.bincount(tokens, minlength=vocabulary)
    count[START] = 0  # a context, never predicted
    last = _last_place(tokens, order)
    orders = [_Counts(ids, nothing, nothing, count, ids == START, int(tokens[last]))]
    rows = tokens  # of the n-gram that ends at each place
    for _ in range(2, order + 1):
        # An n-gram as one number: the row of its prefix and its last word.
        before = np.concatenate(([-1], rows[:-1]))
        here = (before >= 0) & (tokens != START)
        keys, first, inverse, count = np.unique(
            before[here] * vocabulary + tokens[here], return_index=True, return_inverse=True, return_counts=True
        )
        prefix = keys // vocabulary
        # ``rows`` is still of the order below: the n-gram without its first word, which ends at the same place.
        suffix = rows[here][first]
        rows = np.full(len(tokens), -1)
        rows[here] = inverse
        orders.append(_Counts(keys, prefix, suffix, count, orders[-1].from_start[prefix], int(rows[last])))
    return orders


def _last_place(tokens: Int64[np.ndarray, " t"], order: int) -> int:
    """Find the end of the n-gram that sorts last, by its last word, then the one before it, and so on to ``<s>``."""
    places = np.arange(len(tokens))
    for back in range(order):
        words = tokens[places - back]
        places = places[words == words.max()]
        if words.max() == START:
            break
    return int(places[0])


def _adjusted(grams: _Counts, above: _Counts | None) -> Int64[np.ndarray, " m"]:
    """Return counts at the highest order (no ``above``) and after ``<s>``, else numbers of different left words."""
    if above is None:
        return grams.count
    different = np.bincount(above.suffix, minlength=len(grams.keys))
    return np.where(grams.from_start, grams.count, different)
