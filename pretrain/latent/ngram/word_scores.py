"""Log probabilities of the words of a text under a language model, and its perplexity as KenLM counts it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64

from pretrain.base.errors import DataError

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
