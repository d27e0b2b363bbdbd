"""The vocabulary of a text file, and its sentences as one array of word numbers."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from capt.pretrain.base.errors import DataError, shown
from capt.pretrain.base.files import read_lines, write_text
from capt.pretrain.latent.text_files import DataSection, file_of

logger = logging.getLogger(__name__)


# Words and their numbers: ``<pad> <unk> <s> </s>`` are 0 to 3, as in the released code.


VOCABULARY = "vocabulary.txt"
"""The file of the words in a run and in its checkpoints."""

PAD, UNK, START, END = range(4)
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")


class LatentVocabulary:
    """The words of a model and their numbers.

    Args:
        words: the words without the special ones; ``<unk>`` has the number 1 also where it is a word of the text.
            A ``<pad>`` in the text is an unknown word: the number 0 fills up batches.
        unknown: the word of the text that represents an unknown one and is scored like any other: ``<unk>`` (PTB) or
            ``_UNK`` (Yahoo, Yelp).
    """

    def __init__(self, words: Sequence[str], unknown: str = "<unk>") -> None:
        self.words = (*SPECIAL, *(word for word in words if word not in SPECIAL))
        self._numbers = {word: number for number, word in enumerate(self.words) if number != PAD}
        self.unknown = unknown
        self.unknown_id = self._numbers.get(unknown, UNK)

    @classmethod
    def of(
        cls, sentences: Iterable[Sequence[str]], size: int, unknown: str, min_count: int | None = None
    ) -> LatentVocabulary:
        """Make the vocabulary of the ``size`` most frequent words; equally frequent ones in alphabetical order.

        A word that occurs less than ``min_count`` times is unknown. None is 1 where the text has the word ``unknown``,
        as PTB's files, and else 2: then words that occur once represent the unknown ones, and a model learns how
        probable these are.
        """
        counts = Counter(word for sentence in sentences for word in sentence)
        if min_count is None:
            min_count = 1 if unknown in counts else 2
        frequent = [word for word in counts if counts[word] >= min_count or word == unknown]
        return cls(sorted(frequent, key=lambda word: (-counts[word], word))[:size], unknown)

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 hash of the words in their order."""
        return hashlib.sha256("\n".join((self.unknown, *self.words)).encode()).hexdigest()

    def encode(self, words: Sequence[str]) -> Int64[np.ndarray, " n"]:
        """The numbers of words, without ``<s>`` and ``</s>`` around them."""
        return np.array([self._numbers.get(word, self.unknown_id) for word in words], dtype=np.int64)

    def knows_any(self, sentences: Iterable[Sequence[str]]) -> bool:
        """Return whether the vocabulary holds any word of the sentences."""
        known = self._numbers.keys() - {self.unknown}
        return any(word in known for sentence in sentences for word in sentence)

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The words of numbers, up to ``</s>``."""
        words = []
        for number in numbers:
            if number == END:
                break
            words.append(self.words[number])
        return words

    def save(self, path: Path) -> None:
        """Write one word per line; the first line names the word that represents unknown ones."""
        write_text(path, "\n".join((self.unknown, *self.words)) + "\n")

    @classmethod
    def load(cls, path: Path) -> LatentVocabulary:
        """Read a file that :meth:`save` wrote.

        Raises:
            DataError: the file cannot be read, or is not a vocabulary.
        """
        try:
            # The first line names the unknown word.
            unknown, *words = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: no vocabulary: {error}") from None
        if tuple(words[:4]) != SPECIAL:
            raise DataError(f"{path}: no vocabulary: lines 2 to 5 must be {' '.join(SPECIAL)}")
        lines: dict[str, int] = {}
        for number, word in enumerate(words, start=2):
            if word.split() != [word]:
                raise DataError(f"{path}, line {number}: {shown(word)} is not one word; remove the line")
            if (first := lines.setdefault(word, number)) != number:
                raise DataError(
                    f"{path}, line {number}: {shown(word)} is on line {first} as well; remove one of the two"
                )
        return cls(words[4:], unknown)


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
        """Count the occurrences of a word."""
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


def build_vocabulary(data: DataSection) -> LatentVocabulary:
    """Read ``data.vocabulary_file``; without one, take the most frequent words of the training text.

    Raises:
        DataError: there is no such text, or no word of it occurs ``data.min_count`` times.
    """
    if data.vocabulary_file is not None:
        return LatentVocabulary.load(data.vocabulary_file)
    path = file_of(data, "train")
    if path is None:
        raise DataError(f"data.path {data.path}: no file whose name says train; set data.train")
    vocabulary = LatentVocabulary.of(read(path, data.format), data.vocabulary, data.unknown, data.min_count)
    if len(vocabulary) == len(SPECIAL) and data.min_count != 1:
        raise DataError(f"{path}: no word occurs {data.min_count or 2} times: set data.min_count=1")
    return vocabulary


def load_sentences(data: DataSection, split: str, vocabulary: LatentVocabulary) -> Sentences | None:
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
        raise DataError(f"{path}: holds no known word; the vocabulary of {len(vocabulary)} words belongs to other text")
    return Sentences.of(encoded)


# Where sentences end in a matrix of tokens whose shorter rows are filled up with ``<pad>``.


def ends_of(tokens: Int[Tensor, "n length"]) -> Int[Tensor, " n"]:
    """The position of ``</s>`` in each row: the last token that is no ``<pad>``."""
    return (tokens != PAD).sum(1) - 1


def predicted(tokens: Int[Tensor, "n length"]) -> Bool[Tensor, "n length_minus_1"]:
    """Return a mask of the tokens after ``<s>`` that are predicted: words and ``</s>``, but no ``<pad>``."""
    return tokens[:, 1:] != PAD


# The share of unknown words in a text, and a warning where a model cannot know how probable they are.


def report_unknown(sentences: Sentences, what: str, unknown: int, in_training: int | None) -> None:
    """Log the share of unknown words among the scored tokens of a held-out text.

    Args:
        sentences: the text.
        what: its name in the log.
        unknown: the number of the unknown word.
        in_training: how often the training text has it; None where that is not known.
    """
    count = sentences.count(unknown)
    share = count / sentences.scored
    logger.info("%s: %.2f%% of %d scored tokens are unknown words", what, 100 * share, sentences.scored)
    if count and in_training == 0:
        logger.warning(
            "%s: %.2f%% of the scored tokens are unknown words, and the training text has none, so the probability "
            "that they get means nothing: read ppl_known, or train with data.min_count=2", what, 100 * share,
        )  # fmt: skip
