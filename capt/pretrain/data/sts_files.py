"""Read sets of scored sentence pairs: STS-B (GLUE's or the original files), STS12-16 and SICK-R in SentEval's layout.

Protocol (SentEval, SimCSE): the subsets of a year are concatenated into one set, words are joined by one space, and
pairs whose score is empty are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.errors import DataError, names_in
from capt.pretrain.base.files import number_in, read_lines
from capt.pretrain.data.csv_rows import require_one_of_each

SUBSETS = {
    "STS12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "STS13": ("FNWN", "headlines", "OnWN"),
    "STS14": ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "STS15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "STS16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
"""SentEval's subsets of each year; STS13 comes without SMT, which may not be redistributed."""

_STSB_PLACES = ("", "STS-B", "STSBenchmark", "STS/STSBenchmark")
MAX_SCORE = 5.0
"""The score of two sentences that mean the same; 0 represents unrelated ones."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """A set of sentence pairs with their similarity as people judged it: 0 (unrelated) to 5 (equivalent)."""

    name: str
    split: str
    first: list[str]
    second: list[str]
    gold: Float[np.ndarray, " n"]


def find_sets(folder: Path, splits: Sequence[str] = ("dev", "test")) -> list[Pairs]:
    """Every set found in ``folder``: an STS-B folder, a GLUE folder, or SentEval's ``downstream`` folder.

    ``splits`` chooses among those of STS-B. STS12-16 and SICK-R (here its 4,927 test pairs; MTEB's SICK-R is all 9,927)
    count as ``test``.

    Raises:
        DataError: no set is there, or a file is malformed (the message names file and line).
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give one that holds STS-B, or SentEval's STS and SICK folders")
    sets: list[Pairs] = []
    if "test" in splits:
        for year, subsets in SUBSETS.items():
            place = _first(folder, (f"{year}-en-test", f"STS/{year}-en-test"))
            if place is not None:
                sets.append(_pairs(year, "test", place, [_read_senteval(place, subset) for subset in subsets]))
    sets += [pairs for split in splits if (pairs := _stsb(folder, split)) is not None]
    sick = _first(folder, ("SICK_test_annotated.txt", "SICK/SICK_test_annotated.txt"))
    if sick is not None and "test" in splits:
        columns = ("sentence_A", "sentence_B", "relatedness_score")
        sets.append(_pairs("SICK-R", "test", sick, [_read_table(sick, columns)]))
    if not sets:
        raise DataError(
            f"{folder}: holds no STS set; expected STS-B's dev.tsv or sts-test.tsv, or SentEval's STS/STS12-en-test "
            "or SICK/SICK_test_annotated.txt"
        )
    return sets


ScoredPair = tuple[str, str, float]
"""Two sentences and the score of their similarity."""


def _stsb(folder: Path, split: str) -> Pairs | None:
    for place in _STSB_PLACES:
        names = [f"{part}sts-{split}.{end}" for part in ("", "original/") for end in ("tsv", "csv")]
        original = _first(folder / place, names)
        if original is not None:
            return _pairs("STS-B", split, original, [_read_stsb(original)])
        glue = folder / place / f"{split}.tsv"
        if split != "test" and glue.exists():  # GLUE's test file has no scores
            return _pairs("STS-B", split, glue, [_read_table(glue, ("sentence1", "sentence2", "score"))])
    return None


def _first(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).exists()), None)


def _pairs(name: str, split: str, place: Path, parts: Sequence[Sequence[ScoredPair]]) -> Pairs:
    pairs = [row for part in parts for row in part]
    if len(pairs) < 2:
        raise DataError(f"{place}: {len(pairs)} scored pairs; a correlation needs at least two")
    return Pairs(name, split, [r[0] for r in pairs], [r[1] for r in pairs], np.array([r[2] for r in pairs]))


def _read_senteval(folder: Path, subset: str) -> list[ScoredPair]:
    texts, scores = folder / f"STS.input.{subset}.txt", folder / f"STS.gs.{subset}.txt"
    inputs, golds = list(_lines(texts)), list(_lines(scores))
    if len(inputs) != len(golds):
        raise DataError(f"{scores}: {len(golds)} lines, but {texts.name} has {len(inputs)}; line i scores pair i")
    pairs: list[ScoredPair] = []
    for (number, line), (_, gold) in zip(inputs, golds, strict=True):
        cells = line.split("\t")
        if len(cells) != 2:
            raise DataError(f"{texts}, line {number}: {len(cells)} columns; expected two sentences and a tab between")
        # A pair that was not judged has an empty line, so that line i scores pair i.
        if gold.strip():
            pairs.append((*_sentences(cells, texts, number), read_score(gold, scores, number)))
    return pairs


def _read_stsb(path: Path) -> list[ScoredPair]:
    """The original files: genre, file, year, id, score, sentence, sentence [, source, source], without a header."""
    pairs: list[ScoredPair] = []
    for number, line in _lines(path):
        cells = line.split("\t")
        if len(cells) not in (7, 9):
            raise DataError(f"{path}, line {number}: {len(cells)} columns; STS-B's own files have 7, or 9 with sources")
        pairs.append((*_sentences(cells[5:7], path, number), read_score(cells[4], path, number)))
    return pairs


def _read_table(path: Path, columns: Sequence[str]) -> list[ScoredPair]:
    """A tab-separated file with a header; ``columns`` names the two sentences and the score. Quotes are just text."""
    lines = _lines(path)
    header = next(lines)[1].split("\t")
    require_one_of_each(path, header, ", line 1")
    missing = [column for column in columns if column not in header]
    if missing:
        raise DataError(f"{path}, line 1: no column {', '.join(missing)}; the header has {names_in(header)}")
    first, second, gold = (header.index(column) for column in columns)
    pairs: list[ScoredPair] = []
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != len(header):
            raise DataError(f"{path}, line {number}: {len(cells)} columns; the header has {len(header)}")
        pairs.append((*_sentences((cells[first], cells[second]), path, number), read_score(cells[gold], path, number)))
    return pairs


def _sentences(cells: Sequence[str], path: Path, number: int) -> tuple[str, str]:
    # SentEval joins words by one space.
    first, second = (" ".join(cell.split()) for cell in cells)
    if not (first and second):
        raise DataError(f"{path}, line {number}: a sentence is empty")
    return first, second


def read_score(text: str, path: Path, number: int) -> float:
    """The similarity in a cell of line ``number``. Raises ``DataError`` unless it is a number from 0 to 5."""
    value = number_in(text)
    if value is None:
        raise DataError(f"{path}, line {number}: score {text[:80]!r} is not a number from 0 to 5")
    if not 0 <= value <= MAX_SCORE:
        raise DataError(f"{path}, line {number}: score {text.strip()} is outside 0 to 5")
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    lines = list(read_lines([path]))
    if not any(map(str.strip, lines)):
        raise DataError(f"{path}: the file is empty")
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise DataError(f"{path}, line {number}: binary, not text: it holds a NUL")
        yield number, line
