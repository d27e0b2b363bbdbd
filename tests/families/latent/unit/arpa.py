"""Reads the ARPA files of ``lmplz``, to compare its models and the scores of small ones with ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from capt.pretrain.latent.ngram import SPECIAL, Level, NGramModel


def read_arpa(path: Path) -> NGramModel:
    """Read a well-formed file, in which every prefix of an n-gram is listed; a missing back-off weight is 0."""
    sections = path.read_text(encoding="utf-8").split("-grams:\n")[1:]
    rows = [[line.split("\t") for line in section.splitlines() if "\t" in line] for section in sections]
    listed = [gram for _, gram, *_ in rows[0]]
    words = [*SPECIAL, *(word for word in listed if word not in SPECIAL)]
    assert sorted(listed) == sorted(words), "each word once, the special ones among them"
    numbers = {word: number for number, word in enumerate(words)}
    levels: list[Level] = []
    for n, section in enumerate(rows, start=1):
        ids = np.array([[numbers[word] for word in row[1].split(" ")] for row in section], dtype=np.int64).reshape(
            -1, n
        )
        keys = ids[:, 0]
        for level, word in zip(levels, ids.T[1:], strict=True):
            prefix = level.find(keys)
            assert (prefix >= 0).all()
            keys = prefix * len(words) + word
        order = np.argsort(keys, kind="stable")
        assert (np.diff(keys[order]) > 0).all(), "each n-gram once"
        log10 = np.array([float(row[0]) for row in section])
        backoff = np.array([float(row[2]) if len(row) > 2 else 0.0 for row in section])
        levels.append(Level(keys[order], log10[order], backoff[order]))
    return NGramModel(words, levels)
