"""ARPA files: the text form of n-gram models that KenLM, SRILM and others write and read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from pretrain.base.errors import DataError
from pretrain.latent.ngram.model import SPECIAL, Level, NGramModel

_Section = tuple[list[str], list[float], list[float]]
"""N-grams as text, log10 p, log10 back-off."""

_COUNT = re.compile(r"ngram (\d+)=\s*(\d+)")


def write_arpa(model: NGramModel, path: Path) -> None:
    """Write ``log10 p <tab> words [<tab> log10 back-off]`` for each n-gram, with 9 significant digits.

    As ``lmplz`` does, back-off weights of 0 are written, and the highest order has none.
    """
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("\\data\\\n")
        file.writelines(f"ngram {n}={len(level.keys)}\n" for n, level in enumerate(model.levels, start=1))
        grams: Sequence[str] = model.words
        for n, level in enumerate(model.levels, start=1):
            if n > 1:
                prefixes, words = np.divmod(level.keys, len(model.words))
                grams = [f"{grams[p]} {model.words[w]}" for p, w in zip(prefixes, words, strict=True)]
            file.write(f"\n\\{n}-grams:\n")
            if n < model.order:
                rows = zip(level.log10, grams, level.backoff, strict=True)
                file.writelines(f"{p:.9g}\t{gram}\t{b:.9g}\n" for p, gram, b in rows)
            else:
                file.writelines(f"{p:.9g}\t{gram}\n" for p, gram in zip(level.log10, grams, strict=True))
        file.write("\n\\end\\\n")


def read_arpa(path: Path) -> NGramModel:
    """Read an ARPA file; a missing back-off weight is 0.

    Raises:
        DataError: no such file, or it is damaged: the line, and what should be there.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            return _Reader(path, file).model()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no ARPA file: {error}") from None


class _Reader:
    """Reads a file from top to bottom; ``at`` is the number of the line read last."""

    def __init__(self, path: Path, lines: Iterator[str]) -> None:
        self.path = path
        self.lines = lines
        self.at = 0

    def model(self) -> NGramModel:
        line = self._line()
        while line != "\\data\\":  # comments may come first
            line = self._line()
        counts = self._counts()
        unigrams = self._section(1, counts[0])
        words = unigrams[0]
        ordered = [*SPECIAL, *(word for word in words if word not in SPECIAL)]
        numbers = {word: number for number, word in enumerate(ordered)}
        if not len(numbers) == len(ordered) == len(words):
            self._wrong("the 1-grams must hold <unk>, <s>, </s> and each other word, once")
        levels = [self._level(1, unigrams, numbers, [])]
        for n, count in enumerate(counts[1:], start=2):
            levels.append(self._level(n, self._section(n, count), numbers, levels))
        self._expect("\\end\\")
        return NGramModel(ordered, levels)

    def _counts(self) -> list[int]:
        counts: list[int] = []
        while line := self._line():
            match = _COUNT.fullmatch(line)
            if match is None or int(match[1]) != len(counts) + 1:
                self._wrong(f"expected 'ngram {len(counts) + 1}=(a number)'")
            counts.append(int(match[2]))
        if not counts:
            self._wrong("expected 'ngram 1=(a number)'")
        return counts

    def _section(self, n: int, count: int) -> _Section:
        self._expect(f"\\{n}-grams:")
        grams, log10, backoff = [], [], []
        for _ in range(count):
            cells = self._line().split("\t")
            try:
                log10.append(float(cells[0]))
                grams.append(cells[1])
                backoff.append(float(cells[2]) if len(cells) > 2 else 0.0)
            except (ValueError, IndexError):
                self._wrong(f"expected one of {count} {n}-grams: log10 p <tab> words [<tab> log10 back-off]")
            if cells[1].count(" ") != n - 1:
                self._wrong(f"expected {n} words, one space between them")
        self._expect("")
        return grams, log10, backoff

    def _level(self, n: int, section: _Section, numbers: dict[str, int], below: list[Level]) -> Level:
        grams, log10, backoff = section
        ids = np.array([numbers.get(word, -1) for gram in grams for word in gram.split(" ")], dtype=np.int64)
        words = ids.reshape(len(grams), n).T
        keys, listed = words[0], bool((ids >= 0).all())
        for level, word in zip(below, words[1:], strict=True):
            prefix = level.find(keys)
            listed &= bool((prefix >= 0).all())
            keys = prefix * len(numbers) + word
        if not listed:
            self._wrong(f"{n}-grams: a word or the first {n - 1} words of one of them are not listed above")
        order = np.argsort(keys, kind="stable")
        if (np.diff(keys[order]) == 0).any():
            self._wrong(f"{n}-grams: one of them is listed twice")
        return Level(keys[order], np.array(log10)[order], np.array(backoff)[order])

    def _expect(self, line: str) -> None:
        if self._line() != line:
            self._wrong(f"expected {line or 'an empty line'}")

    def _line(self) -> str:
        self.at += 1
        line = next(self.lines, None)
        if line is None:
            self._wrong("the file ends before \\end\\")
        return line.rstrip("\r\n")

    def _wrong(self, expected: str) -> NoReturn:
        raise DataError(f"{self.path}, line {self.at}: damaged ARPA file: {expected}")
