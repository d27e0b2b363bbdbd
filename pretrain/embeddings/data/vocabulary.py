"""The words of a text with their counts, most frequent first."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64

from pretrain.base.atomic import new_file
from pretrain.base.errors import CheckpointError, DataError
from pretrain.base.files import printable
from pretrain.base.text_lines import read_lines

VOCABULARY = "vocabulary.txt"
_WORD = re.compile(r"[^ \t\n\r\v\f]+")
_OTHER_SPACE = re.compile(r"[^\S \t\n\r\v\f]")


def split_words(text: str) -> list[str]:
    r"""Split text at the blanks of ASCII: space and ``\t \n \r \v \f``.

    Files of word vectors are split alike, as by word2vec and GloVe: other spaces, such as the no-break space and the
    ideographic one, are characters of a word.
    """
    return _WORD.findall(text) if _OTHER_SPACE.search(text) else text.split()  # which is twice as fast


class Vocabulary:
    """Words and how often they occur; the number of a word is its row in the tables.

    Args:
        words: the words, most frequent first, ties in the order of their code points.
        counts: occurrences of each word in the text.
    """

    def __init__(self, words: tuple[str, ...], counts: Int64[np.ndarray, " V"]) -> None:
        assert len(words) == len(counts)
        self.words = words
        self.counts = counts

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the words in their order, in hexadecimal."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    @classmethod
    def of(cls, counts: Mapping[str, int], min_count: int, largest: int | None = None) -> Vocabulary:
        """The words that occur at least ``min_count`` times, or the ``largest`` most frequent of them."""
        kept = [(-count, word) for word, count in counts.items() if count >= min_count]
        kept.sort()
        kept = kept[:largest]
        return cls(tuple(word for _, word in kept), np.array([-count for count, _ in kept], dtype=np.int64))

    def noise(self, power: float = 0.75) -> Float64[np.ndarray, " V"]:
        r"""The noise distribution of word2vec, :math:`P(w) \propto \mathrm{count}(w)^{power}`."""
        weights = self.counts.astype(np.float64) ** power
        distribution: Float64[np.ndarray, " V"] = weights / weights.sum()
        return distribution

    def keep_probability(self, threshold: float) -> Float64[np.ndarray, " V"]:
        r"""The probability that an occurrence of a word survives subsampling, as in the code of word2vec.

        .. math:: \min(1, \sqrt{t / f} + t / f)

        with the word's share :math:`f` of the text; 1 for every word where ``threshold`` :math:`t` is 0.
        """
        if threshold == 0:
            return np.ones(len(self))
        ratio = threshold * self.counts.sum() / np.maximum(self.counts, 1)
        kept: Float64[np.ndarray, " V"] = np.minimum(1.0, np.sqrt(ratio) + ratio)
        return kept

    def save(self, path: Path) -> None:
        """Write ``word count`` lines; the file appears whole."""
        with new_file(path) as file:
            file.writelines(f"{word} {count}\n" for word, count in zip(self.words, self.counts.tolist(), strict=True))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what :meth:`save` has written.

        Raises:
            DataError: a line is not ``word count``, or a word occurs there twice.
        """
        words, counts = [], []
        seen: set[str] = set()
        for number, line in enumerate(read_lines([path]), 1):  # only \n ends a line: a word may hold its relatives
            word, _, count = line.rpartition(" ")
            if (
                not word
                or split_words(word) != [word]
                or not (count.isdecimal() and count.isascii() and len(count) < 19)
            ):
                raise DataError(f"{path}, line {number}: {printable(line, 80)!r} is not `word count`")
            if word in seen:
                raise DataError(f"{path}, line {number}: the word {printable(word, 80)!r} occurs there twice")
            seen.add(word)
            words.append(word)
            counts.append(int(count))
        return cls(tuple(words), np.array(counts, dtype=np.int64))


def other_vocabulary(folder: Path) -> CheckpointError:
    """The error of a checkpoint whose rows are those of other words."""
    return CheckpointError(
        f"{folder}: trained with another vocabulary than that of this job's text: resume with the text and the "
        "data.min_count, data.max_vocabulary and data.lowercase of its config.yaml"
    )
