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

PAD, UNK, START, END = range(4)
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")


class Vocabulary:
    """The words of a model. ``unknown`` is the ordinary word that an unknown one becomes; it is scored like any other.

    Args:
        words: without the special ones; ``<unk>``, where it is an ordinary word of the text, has the number 1.
        unknown: such as ``<unk>`` (PTB) or ``_UNK`` (Yahoo, Yelp).
    """

    def __init__(self, words: Sequence[str], unknown: str = "<unk>") -> None:
        self.words = (*SPECIAL, *(word for word in words if word not in SPECIAL))
        self._numbers = {word: number for number, word in enumerate(self.words)}
        self.unknown = unknown
        self.unknown_id = self._numbers.get(unknown, UNK)

    @classmethod
    def of(cls, sentences: Iterable[Sequence[str]], size: int, unknown: str) -> Vocabulary:
        """The ``size`` most frequent words; equally frequent ones in alphabetical order."""
        counts = Counter(word for sentence in sentences for word in sentence)
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ordered[:size], unknown)

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the words in order."""
        return hashlib.sha256("\n".join((self.unknown, *self.words)).encode()).hexdigest()

    def encode(self, words: Sequence[str]) -> Int64[np.ndarray, " n"]:
        """Numbers of the words, without ``<s>`` and ``</s>``."""
        return np.array([self._numbers.get(word, self.unknown_id) for word in words], dtype=np.int64)

    def knows_any(self, sentences: Iterable[Sequence[str]]) -> bool:
        """Whether any word of the sentences is a known one."""
        known = self._numbers.keys() - {self.unknown}
        return any(word in known for sentence in sentences for word in sentence)

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The words up to ``</s>``."""
        words = []
        for number in numbers:
            if number == END:
                break
            words.append(self.words[number])
        return words

    def save(self, path: Path) -> None:
        """One word a line; the first line names the word for unknown ones."""
        write_text(path, "\n".join((self.unknown, *self.words)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """What :meth:`save` wrote.

        Raises:
            DataError: not such a file.
        """
        try:
            unknown, *words = path.read_text(encoding="utf-8").split("\n")[:-1]
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: no vocabulary: {error}") from None
        if tuple(words[:4]) != SPECIAL:
            raise DataError(f"{path}: no vocabulary: lines 2 to 5 must be {' '.join(SPECIAL)}")
        return cls(words[4:], unknown)
