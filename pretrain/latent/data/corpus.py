"""The sentences of a text file as one array of word numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from pretrain.base.errors import DataError
from pretrain.base.text_lines import read_lines
from pretrain.latent.data.vocabulary import END, PAD, SPECIAL, START, Vocabulary
from pretrain.latent.text_files import DataSection, file_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sentences:
    """``tokens[offsets[i] : offsets[i + 1]]`` is ``<s> w1 .. wn </s>`` of sentence ``i``.

    ``scored`` is the number of tokens that a language model predicts: the words and one ``</s>`` per sentence.
    """

    tokens: Int64[np.ndarray, " t"]
    offsets: Int64[np.ndarray, " n_plus_1"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Number of tokens of each sentence, ``<s>`` and ``</s>`` included."""
        lengths: Int64[np.ndarray, " n"] = np.diff(self.offsets)
        return lengths

    def count(self, word: int) -> int:
        """How often a word occurs."""
        return int((self.tokens == word).sum())

    @property
    def scored(self) -> int:
        """Number of tokens that a language model predicts."""
        return len(self.tokens) - len(self)

    def rows(self, numbers: Int64[np.ndarray, " m"], length: int | None = None) -> Int64[np.ndarray, "m length"]:
        """The tokens of sentences as a matrix, with ``<pad>`` up to ``length`` tokens, else up to the longest."""
        own = self.lengths[numbers][:, None]
        place = np.arange(own.max() if length is None else length)
        at = np.minimum(self.offsets[numbers][:, None] + place, len(self.tokens) - 1)
        rows: Int64[np.ndarray, "m length"] = np.where(place < own, self.tokens[at], PAD)
        return rows

    @classmethod
    def of(cls, encoded: list[np.ndarray]) -> Sentences:
        """Make the array of sentences that are given as word numbers without ``<s>`` and ``</s>``."""
        framed = [np.concatenate(([START], words, [END])) for words in encoded]
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in framed]))).astype(np.int64)
        return cls(np.concatenate(framed).astype(np.int64), offsets)


def read(path: Path, format: str, *, count_blank: bool = False) -> Iterator[list[str]]:
    """Yield the words of each line that is not blank; with ``count_blank`` the log says how many are.

    Raises:
        DataError: the file is empty, binary, not UTF-8 or not gzip, or a line has no label.
    """
    blank = 0
    for number, line in enumerate(read_lines([path]), 1):
        if "\0" in line:
            raise DataError(f"{path}, line {number}: binary, not text (NUL); convert it with iconv first")
        if format == "labelled":
            _, tab, line = line.partition("\t")
            if not tab:
                raise DataError(f"{path}, line {number}: no tab; data.format labelled reads `label TAB text`")
        if words := line.split():
            yield words
        else:
            blank += 1
    if blank and count_blank:
        logger.info("%s: %s of %s lines are blank and left out", path, f"{blank:,}", f"{number:,}")


def build_vocabulary(data: DataSection) -> Vocabulary:
    """Read ``data.vocabulary_file``; without one, take the most frequent words of the training text.

    Raises:
        DataError: there is no such text, or no word of it occurs ``data.min_count`` times.
    """
    if data.vocabulary_file is not None:
        return Vocabulary.load(data.vocabulary_file)
    path = file_of(data, "train")
    if path is None:
        raise DataError(f"data.path {data.path}: no file whose name says train; set data.train")
    vocabulary = Vocabulary.of(read(path, data.format), data.vocabulary, data.unknown, data.min_count)
    if len(vocabulary) == len(SPECIAL) and data.min_count != 1:
        raise DataError(f"{path}: no word occurs {data.min_count or 2} times: set data.min_count=1")
    return vocabulary


def load_sentences(data: DataSection, split: str, vocabulary: Vocabulary) -> Sentences | None:
    """Load the sentences of a split; None where it has no file. A warning counts those over ``data.max_words``.

    Raises:
        DataError: no sentence is left, or none has a known word.
    """
    path = file_of(data, split)
    if path is None:
        return None
    encoded, long = [], 0
    for words in read(path, data.format, count_blank=True):
        if len(words) > data.max_words:
            long += 1
        else:
            encoded.append(vocabulary.encode(words))
    if long:
        logger.warning("%s: %d sentences of more than data.max_words=%d left out", path, long, data.max_words)
    if not encoded:
        raise DataError(f"{path}: no sentence of 1 to {data.max_words} words")
    if all((row == vocabulary.unknown_id).all() for row in encoded):
        raise DataError(f"{path}: holds no known word; the vocabulary of {len(vocabulary)} words is of other text")
    return Sentences.of(encoded)
