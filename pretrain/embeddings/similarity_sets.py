"""Reads sets of word pairs whose similarity people have scored: Rare Word, WS-353, SimVerb and their like."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from pretrain.base.errors import DataError, shown
from pretrain.base.text_lines import read_lines
from pretrain.embeddings.data.vocabulary import split_words
from pretrain.embeddings.vectors.layout import is_number

MOST_PAIRS = 1_000_000
"""Pairs of a set, at most."""

SUFFIXES = (".txt", ".tsv", ".txt.gz", ".tsv.gz")
"""The names that files of a folder of sets end with."""


@dataclass(frozen=True)
class WordPairs:
    """Pairs of words with the similarity that people gave them, in the set's own scale; larger is more similar."""

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    gold: Float64[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.first)


def find_sets(path: Path) -> list[WordPairs]:
    """Read one file of word pairs, or every ``.txt`` and ``.tsv`` file of a folder, in the order of their names.

    Raises:
        DataError: there is no such file, a folder holds none, or a line is faulty (file and line are named).
    """
    if not path.is_dir():
        return [read_set(path)]
    files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and not file.name.startswith("."))
    if not files:
        raise DataError(f"{path}: holds no {' or '.join(SUFFIXES[:2])} file of word pairs")
    return [read_set(file) for file in files]


def read_set(path: Path) -> WordPairs:
    """Read a file with a pair in each line: word, word, score; by tabs where the line has one, else by blanks.

    Further columns must be numbers: the scores of single people, as in the original ``rw.txt``. There is no header. A
    carriage return before the line's end is dropped, and lines with nothing in them are passed over.

    Raises:
        DataError: the file cannot be read, or a line lacks a column or has a score that is not a number.
    """
    pairs: list[tuple[str, str, float]] = []
    for number, line in enumerate(read_lines([path]), start=1):
        if not line.strip():
            continue
        if len(pairs) == MOST_PAIRS:
            raise DataError(f"{path}, line {number}: more than {MOST_PAIRS:,} pairs")
        pairs.append(_read_pair(line, f"{path}, line {number}"))
    if len(pairs) < 2:
        raise DataError(f"{path}: {len(pairs)} scored pairs; a correlation needs at least two")
    first, second, gold = zip(*pairs, strict=True)
    return WordPairs(_name(path), first, second, np.array(gold))


def _read_pair(line: str, where: str) -> tuple[str, str, float]:
    columns = [cell.strip() for cell in line.split("\t")] if "\t" in line else split_words(line)
    if len(columns) < 3:
        raise DataError(f"{where}: {len(columns)} columns; expected word, word and score, by tabs or by spaces")
    if not (columns[0] and columns[1]):
        raise DataError(f"{where}: a word is empty; expected word, word and score")
    scores = []
    for cell in columns[2:]:
        if not is_number(cell.encode()):
            raise DataError(
                f"{where}: {shown(cell)} is not a score; expected word, word, score and nothing but scores after that "
                "(no header)"
            )
        scores.append(float(cell))
    if not math.isfinite(scores[0]):
        raise DataError(f"{where}: score {columns[2]} is not finite")
    return columns[0], columns[1], scores[0]


def _name(path: Path) -> str:
    name = path.name
    for suffix in SUFFIXES[::-1]:
        name = name.removesuffix(suffix)
    return name.removeprefix("EN-")
