"""Analogies (a is to b as c is to ?) in the form of word2vec's ``questions-words.txt``, answered by 3CosAdd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from pretrain.base.errors import DataError, shown
from pretrain.base.progress import ProgressCallback
from pretrain.base.text_lines import read_lines
from pretrain.embeddings.data.vocabulary import split_words
from pretrain.embeddings.vectors.word_vectors import WordVectors

TOTAL = "total"
"""The name of the sums over all sections."""

MOST_QUESTIONS = 10_000_000
_NUMBERS_AT_ONCE = 1 << 25
"""Scores of a block of questions: 128 MiB."""


@dataclass
class Section:
    """Questions under one ``: name`` line: rows of the words where all four have vectors, and how many there are."""

    name: str
    questions: int = 0
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)


def read_sections(path: Path, vectors: WordVectors) -> list[Section]:
    """Read ``: section`` lines and lines of four words; the words are looked up as `WordVectors.find` does.

    Raises:
        DataError: the file cannot be read, holds no question, two sections have one name, or a line is not four words;
            file and line are named.
    """
    sections: list[Section] = []
    for number, line in enumerate(read_lines([path]), start=1):
        words = split_words(line)
        if not words:
            continue
        if words[0].startswith(":"):
            name = " ".join(words).lstrip(":").strip()
            if name == TOTAL or name in (section.name for section in sections):
                taken = "that of the sums" if name == TOTAL else "that of a section above"
                raise DataError(f"{path}, line {number}: the name {shown(name)} is {taken}; give the section another")
            sections.append(Section(name))
            continue
        if len(words) != 4:
            raise DataError(
                f"{path}, line {number}: {len(words)} words; a question has four, a section begins with ':'"
            )
        if not sections:
            sections.append(Section(path.stem))
        sections[-1].questions += 1
        rows = [vectors.find(word) for word in words]
        if None not in rows:
            sections[-1].rows.append(tuple(rows))  # type: ignore[arg-type]
        if number > MOST_QUESTIONS:
            raise DataError(f"{path}, line {number}: more than {MOST_QUESTIONS:,} lines")
    if not any(section.questions for section in sections):
        raise DataError(f"{path}: holds no question, a line of four words")
    return sections


def score_analogies(
    vectors: WordVectors, path: Path, progress: ProgressCallback | None = None
) -> dict[str, dict[str, Any]]:
    """Return for each section, and for ``total``, the questions, those covered, and those answered right.

    The answer to a : b = c : ? is the word, other than a, b and c, whose vector has the largest cosine with
    b / |b| - a / |a| + c / |c| (3CosAdd; Mikolov et al. 2013) among all words.

    Raises:
        DataError: as `read_sections`, or no question has vectors for all four words.
    """
    sections = read_sections(path, vectors)
    covered = sum(len(section.rows) for section in sections)
    if not covered:
        asked = sum(section.questions for section in sections)
        raise DataError(f"{path}: none of the {asked:,} questions has vectors for all four words")
    lengths = np.where(vectors.norms > 0, vectors.norms, 1)
    unit = np.divide(vectors.matrix, lengths[:, None], out=np.empty_like(vectors.matrix), casting="same_kind")
    results: dict[str, dict[str, Any]] = {}
    done = 0
    for section in sections:
        right = 0
        for rows in _blocks(section, len(vectors)):
            right += _count_right(unit, rows)
            done += len(rows)
            if progress is not None:
                progress(done, covered)
        results[section.name] = _row(section.questions, len(section.rows), right)
    totals = [sum(row[key] for row in results.values()) for key in ("questions", "covered", "right")]
    return {**results, TOTAL: _row(*totals)}


def _blocks(section: Section, words: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    size = max(1, _NUMBERS_AT_ONCE // words)
    rows = np.array(section.rows, dtype=np.int64).reshape(-1, 4)
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _count_right(unit: Float32[np.ndarray, "V d"], rows: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    a, b, c, answer = rows.T
    scores = (unit[b] - unit[a] + unit[c]) @ unit.T
    for given in (a, b, c):
        scores[np.arange(len(rows)), given] = -np.inf
    return int((scores.argmax(axis=1) == answer).sum())


def _row(questions: int, covered: int, right: int) -> dict[str, Any]:
    return {
        "questions": questions,
        "covered": covered,
        "right": right,
        "accuracy_covered": 100 * right / covered if covered else None,
        "accuracy_all": 100 * right / questions if questions else None,
    }
