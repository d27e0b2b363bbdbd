"""Sentences of a text file as one array of word numbers, and what was left out."""

from __future__ import annotations

import gzip
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from pretrain.base.errors import DataError
from pretrain.latent.config import DataSection
from pretrain.latent.data.vocabulary import END, START, Vocabulary

logger = logging.getLogger(__name__)

_SPLITS = {"train": r"train", "validation": r"validation|valid|dev|val", "test": r"test"}


@dataclass(frozen=True)
class Sentences:
    """``tokens[offsets[i] : offsets[i + 1]]`` is ``<s> w1 .. wn </s>`` of sentence ``i``.

    ``scored`` counts what a language model predicts: the words and one ``</s>`` a sentence.
    """

    tokens: Int64[np.ndarray, " t"]
    offsets: Int64[np.ndarray, " n_plus_1"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Of the sentences, ``<s>`` and ``</s>`` included."""
        lengths: Int64[np.ndarray, " n"] = np.diff(self.offsets)
        return lengths

    @property
    def scored(self) -> int:
        """Words and ends of sentences."""
        return len(self.tokens) - len(self)

    def rows(self, numbers: Int64[np.ndarray, " m"]) -> Int64[np.ndarray, "m length"]:
        """Sentences of one length as a matrix."""
        length = int(self.lengths[numbers[0]])
        rows: Int64[np.ndarray, "m length"] = self.tokens[self.offsets[numbers][:, None] + np.arange(length)]
        return rows

    @classmethod
    def of(cls, encoded: list[np.ndarray]) -> Sentences:
        """Put ``<s>`` and ``</s>`` around each sentence of word numbers."""
        framed = [np.concatenate(([START], words, [END])) for words in encoded]
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in framed]))).astype(np.int64)
        return cls(np.concatenate(framed).astype(np.int64), offsets)


def file_of(data: DataSection, split: str) -> Path | None:
    """The file of ``train``, ``validation`` or ``test``; None where there is none to find.

    Raises:
        DataError: a file named in the job is missing, or several fit.
    """
    named: Path | None = getattr(data, split)
    if named is not None:
        if not named.is_file():
            raise DataError(f"data.{split}: no file {named}")
        return named
    if data.path is None:
        return None
    if not data.path.is_dir():
        raise DataError(f"data.path: no folder {data.path}")
    fits = re.compile(rf"(?:^|[^a-z])(?:{_SPLITS[split]})(?:[^a-z]|$)")
    found = sorted(p for p in data.path.iterdir() if p.name.endswith((".txt", ".txt.gz")) and fits.search(p.name))
    if len(found) > 1:
        raise DataError(f"data.path {data.path}: {found[0].name} and {found[1].name} both fit; set data.{split}")
    return found[0] if found else None


def describe_files(data: DataSection) -> list[str]:
    """A line for the file of each split. Raises ``DataError`` where training or validation text is missing."""
    lines = []
    for split in _SPLITS:
        path = file_of(data, split)
        if path is None and split != "test":
            raise DataError(f"data.path {data.path}: no .txt file whose name says {split}; set data.{split}")
        if path is not None:
            lines.append(f"{split}: {path}, {path.stat().st_size:,} bytes")
    if data.vocabulary_file is not None and not data.vocabulary_file.is_file():
        raise DataError(f"data.vocabulary_file: no file {data.vocabulary_file}")
    return lines


def read(path: Path, format: str) -> Iterator[list[str]]:
    """The words of each line that is not blank.

    Raises:
        DataError: not UTF-8, not gzip, or a line without its label.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if format == "labelled":
                    _, tab, line = line.partition("\t")
                    if not tab:
                        raise DataError(f"{path}, line {number}: no tab; data.format labelled reads `label TAB text`")
                if words := line.split():
                    yield words
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from None


def build_vocabulary(data: DataSection) -> Vocabulary:
    """Of ``data.vocabulary_file``, else the most frequent words of the training text."""
    if data.vocabulary_file is not None:
        return Vocabulary.load(data.vocabulary_file)
    path = file_of(data, "train")
    if path is None:
        raise DataError(f"data.path {data.path}: no file whose name says train; set data.train")
    return Vocabulary.of(read(path, data.format), data.vocabulary, data.unknown)


def load_sentences(data: DataSection, split: str, vocabulary: Vocabulary) -> Sentences | None:
    """The sentences of a split; None where it has no file. Those over ``data.max_words`` are left out and counted.

    Raises:
        DataError: no sentence is left, or none has a known word.
    """
    path = file_of(data, split)
    if path is None:
        return None
    encoded, long = [], 0
    for words in read(path, data.format):
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
