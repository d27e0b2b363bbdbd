"""Word similarity (rank correlation of cosines with human scores, by both rules for unknown words), and analogies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64
from scipy.stats import spearmanr

from capt.pretrain.base.errors import DataError, repeated, shown
from capt.pretrain.base.files import PACKED, read_lines
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.data.formats import suffix_of
from capt.pretrain.embeddings.corpus import split_words
from capt.pretrain.embeddings.vectors import WordVectors, is_number

# Reads sets of word pairs whose similarity people have scored: Rare Word, WS-353, SimVerb and their like.


MOST_PAIRS = 1_000_000
"""Pairs of a set, at most."""

SUFFIXES = (".txt", ".tsv")
"""The suffixes of the files of a folder of sets, each packed or not."""


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
    files = sorted(file for file in path.iterdir() if suffix_of(file) in SUFFIXES and not file.name.startswith("."))
    if not files:
        raise DataError(f"{path}: holds no {' or '.join(SUFFIXES)} file of word pairs")
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
    # Some sets list the scores of every annotator after their mean.
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
    for suffix in (*PACKED, *SUFFIXES):
        name = name.removesuffix(suffix)
    return name.removeprefix("EN-")


CASE_RULE = "a word is looked up as it is written, and in lower case where the vectors do not have it"
"""The treatment of letters of upper case, said with every result."""

RULES = {
    "drop": "pairs with an unknown word are left out",
    "zero": "pairs with an unknown word have cosine 0",
}
"""The two rules for unknown words. Which one a published number used is often not said, and it decides the number."""


@dataclass(frozen=True)
class SetResult:
    """Spearman's rho times 100 of one set.

    Attributes:
        name: the set.
        pairs: its pairs.
        covered: those whose words both have vectors.
        words: its distinct words.
        known: those that have vectors.
        drop: rho of the covered pairs; None where it is not defined: under two pairs, or no two cosines differ.
        zero: rho of all pairs, with cosine 0 for those that are not covered; None as above.
    """

    name: str
    pairs: int
    covered: int
    words: int
    known: int
    drop: float | None
    zero: float | None


@dataclass(frozen=True)
class Cosines:
    """The cosine of every pair of a set, 0 where a word is unknown, and which pairs are covered."""

    pairs: WordPairs
    values: Float[np.ndarray, " n"]
    covered: Bool[np.ndarray, " n"]


def cosines_of(vectors: WordVectors, pairs: WordPairs) -> Cosines:
    """Look up the words of a set (`CASE_RULE`) and take their cosines."""
    rows = [(vectors.find(a), vectors.find(b)) for a, b in zip(pairs.first, pairs.second, strict=True)]
    covered = np.array([a is not None and b is not None for a, b in rows])
    found = [(a, b) for a, b in rows if a is not None and b is not None]
    values = np.zeros(len(pairs))
    values[covered] = vectors.cosines([a for a, _ in found], [b for _, b in found])
    return Cosines(pairs, values, covered)


def spearman(values: Float[np.ndarray, " n"], gold: Float[np.ndarray, " n"]) -> float | None:
    """Return Spearman's rank correlation times 100, ties at their mean rank; None where it is not defined."""
    if len(values) < 2 or np.ptp(values) == 0 or np.ptp(gold) == 0:
        return None
    return 100 * float(spearmanr(values, gold).statistic)


def score_set(vectors: WordVectors, pairs: WordPairs) -> SetResult:
    """Score vectors on one set by both rules."""
    cosines = cosines_of(vectors, pairs)
    words = {*pairs.first, *pairs.second}
    return SetResult(
        pairs.name, len(pairs), int(cosines.covered.sum()), len(words),
        sum(vectors.find(word) is not None for word in words),
        drop=spearman(cosines.values[cosines.covered], pairs.gold[cosines.covered]),
        zero=spearman(cosines.values, pairs.gold) if cosines.covered.any() else None,
    )  # fmt: skip


def score_sets(vectors: WordVectors, sets: Sequence[WordPairs]) -> dict[str, dict[str, Any]]:
    """Score vectors on every set, by its name.

    Raises:
        DataError: no pair of any set has vectors for both words, or two sets have one name.
    """
    results = [score_set(vectors, pairs) for pairs in sets]
    names = [result.name for result in results]
    if twice := repeated(names):
        raise DataError(f"two files of word pairs are both called {twice}: rename one")
    if not any(result.covered for result in results):
        raise DataError(
            f"none of the {sum(len(pairs) for pairs in sets):,} word pairs has vectors for both words "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}; {len(vectors):,} words have vectors): "
            "nothing can be measured"
        )
    return {result.name: {key: value for key, value in asdict(result).items() if key != "name"} for result in results}


# Analogies (a is to b as c is to ?) in the form of word2vec's ``questions-words.txt``, answered by 3CosAdd.


TOTAL = "total"
"""The name of the sums over all sections."""

MOST_QUESTIONS = 10_000_000
_NUMBERS_AT_ONCE = 1 << 25
"""Scores of a block of questions: 128 MiB."""


@dataclass
class SimilaritySection:
    """Questions under one ``: name`` line: rows of the words where all four have vectors, and how many there are."""

    name: str
    questions: int = 0
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)


def read_sections(path: Path, vectors: WordVectors) -> list[SimilaritySection]:
    """Read ``: section`` lines and lines of four words; the words are looked up as `WordVectors.find` does.

    Raises:
        DataError: the file cannot be read, holds no question, two sections have one name, or a line is not four words;
            file and line are named.
    """
    sections: list[SimilaritySection] = []
    taken = {TOTAL: "that of the sums"}
    for number, line in enumerate(read_lines([path]), start=1):
        words = split_words(line)
        if not words:
            continue
        if words[0].startswith(":"):
            name = " ".join(words).lstrip(":").strip()
            if name in taken:
                raise DataError(
                    f"{path}, line {number}: the name {shown(name)} is {taken[name]}; give the section another"
                )
            taken[name] = "that of a section above"
            sections.append(SimilaritySection(name))
            continue
        if len(words) != 4:
            raise DataError(
                f"{path}, line {number}: {len(words)} words; a question has four, a section begins with ':'"
            )
        # Questions before any section make one, named after the file.
        if not sections:
            sections.append(SimilaritySection(path.stem))
            taken[path.stem] = "that of a section above"
        sections[-1].questions += 1
        # A question with an unknown word counts as asked, not as covered.
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
    # A word whose vector is zero has cosine 0 with all others.
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


def _blocks(section: SimilaritySection, words: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
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
