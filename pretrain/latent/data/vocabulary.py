"""Words and their numbers: ``<pad> <unk> <s> </s>`` are 0 to 3, as in the released code."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from pretrain.base.errors import DataError
from pretrain.base.files import write_text

VOCABULARY = "vocabulary.txt"
"""The file of the words in a run and in its checkpoints."""

PAD, UNK, START, END = range(4)
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")


class Vocabulary:
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
    ) -> Vocabulary:
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
        """Whether the vocabulary holds any word of the sentences."""
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
    def load(cls, path: Path) -> Vocabulary:
        """Read a file that :meth:`save` wrote.

        Raises:
            DataError: the file cannot be read, or is no vocabulary.
        """
        try:
            unknown, *words = path.read_text(encoding="utf-8").split("\n")[:-1]
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: no vocabulary: {error}") from None
        if tuple(words[:4]) != SPECIAL:
            raise DataError(f"{path}: no vocabulary: lines 2 to 5 must be {' '.join(SPECIAL)}")
        return cls(words[4:], unknown)
