"""Word similarity: files of pairs, and both rules for unknown words against values worked out by hand."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.embeddings.similarity import (
    WordPairs,
    cosines_of,
    find_sets,
    read_set,
    score_set,
    score_sets,
    spearman,
)
from capt.pretrain.embeddings.vectors import WordVectors

CIRCLE = WordVectors(
    ("a", "b", "c", "d", "paris"),
    np.array([[np.cos(t), np.sin(t)] for t in (0.0, 0.1, 0.5, 2.0, 3.0)], dtype=np.float32),
)
PAIRS = WordPairs(
    "six", ("a", "a", "b", "a", "a", "x"), ("b", "c", "c", "d", "y", "z"), np.array([9.0, 6.0, 7.0, 1.0, 8.0, 0.0])
)


def ranks(values: list[float]) -> np.ndarray:
    """Ranks from 1 on, ties at their mean, by counting."""
    return np.array([sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values])


def rho(first: list[float], second: list[float]) -> float:
    """Spearman's rho from its definition: Pearson's correlation of the ranks."""
    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    return float(100 * (a @ b) / np.sqrt((a @ a) * (b @ b)))


def test_both_rules_for_unknown_words() -> None:
    result = score_set(CIRCLE, PAIRS)
    known = [np.cos(0.1), np.cos(0.5), np.cos(0.4), np.cos(2.0)]
    assert (result.pairs, result.covered, result.words, result.known) == (6, 4, 7, 4)
    assert result.drop == pytest.approx(rho(known, [9, 6, 7, 1]))
    assert result.drop == pytest.approx(100)
    assert result.zero == pytest.approx(rho([*known, 0.0, 0.0], [9, 6, 7, 1, 8, 0]))  # a tie of the two zeros
    assert result.zero != pytest.approx(result.drop)


def test_unknown_words_have_cosine_zero_and_not_the_lowest_rank() -> None:
    """cos(a, d) is negative, so that the two unknown pairs lie above it."""
    values = cosines_of(CIRCLE, PAIRS).values
    assert values[3] < 0
    assert values[4:].tolist() == [0, 0]


def test_ties_have_their_mean_rank() -> None:
    first, second = [1.0, 1.0, 2.0, 3.0, 3.0, 3.0], [1.0, 2.0, 2.0, 5.0, 4.0, 0.0]
    assert spearman(np.array(first), np.array(second)) == pytest.approx(rho(first, second))
    assert spearman(np.ones(3), np.arange(3.0)) is None
    assert spearman(np.ones(1), np.ones(1)) is None


def test_upper_case_is_tried_as_written_first() -> None:
    pairs = WordPairs("case", ("Paris", "A"), ("a", "b"), np.array([1.0, 2.0]))
    assert score_set(CIRCLE, pairs).covered == 2
    both = WordVectors(("A", "a", "b"), np.array([[0, 1], [1, 0], [1, 0]], dtype=np.float32))
    assert cosines_of(both, WordPairs("x", ("A", "a"), ("b", "b"), np.ones(2))).values.tolist() == [0, 1]


def test_a_zero_vector_has_cosine_zero() -> None:
    vectors = WordVectors(("a", "b", "c"), np.array([[1, 0], [0, 0], [2, 0]], dtype=np.float32))
    assert vectors.cosines([0, 0], [1, 2]).tolist() == [0, 1]


def test_an_empty_overlap_is_an_error_and_one_empty_set_among_others_is_not() -> None:
    foreign = WordPairs("foreign", ("ja", "nein"), ("doch", "oder"), np.array([1.0, 2.0]))
    results = score_sets(CIRCLE, [PAIRS, foreign])
    assert results["foreign"]["covered"] == 0
    assert (results["foreign"]["drop"], results["foreign"]["zero"]) == (None, None)
    with pytest.raises(DataError, match=r"none of the 2 word pairs has vectors for both words \(foreign; 5 words"):
        score_sets(CIRCLE, [foreign])
    with pytest.raises(DataError, match="both called six"):
        score_sets(CIRCLE, [PAIRS, PAIRS])


def test_files_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "EN-A.txt").write_bytes(b"\xef\xbb\xbfa\tb\t1.5\r\nnew york\tc\t2\r\n\r\n")  # CR LF, tabs, a blank line
    (tmp_path / "b.tsv").write_text("a b 3\nc   d  4e0")  # spaces, no final newline
    (tmp_path / "rw.txt").write_text("a\tb\t3.5\t4\t3\nc\td\t1\t1\t1\n")  # and the scores of single people
    (tmp_path / "notes.md").write_text("not a set")
    sets = find_sets(tmp_path)
    assert [pairs.name for pairs in sets] == ["A", "b", "rw"]
    assert sets[0].first == ("a", "new york")
    assert [pairs.gold.tolist() for pairs in sets] == [[1.5, 2], [3, 4], [3.5, 1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\tb\t1\r\na\tb\r\n", "line 2: 2 columns; expected word, word and score"),
        (b"a b 1\nc\n", "line 2: 1 columns"),
        (b"a\tb\t1\n\tb\t2\n", "line 2: a word is empty"),
        (b"word1\tword2\tscore\na\tb\t1\n", "line 1: 'score' is not a score"),
        (b"take\tremove\tV\t6.81\tSYNONYMS\n", "line 1: 'V' is not a score"),
        (b"a b 1_0\na c 2\n", "line 1: '1_0' is not a score"),
        (b"a\tb\tnan\na\tc\t1\n", "line 1: score nan is not finite"),
        (b"a\tb\t1\ncaf\xe9\tb\t1\n", "line 2: not UTF-8"),
        (b"a\tb\t1\n", "1 scored pairs; a correlation needs at least two"),
        (b"", "the file is empty"),
    ],
)
def test_bad_files_are_named_by_file_and_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_set(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_folder_without_sets_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no"):
        find_sets(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        find_sets(tmp_path / "absent")


@pytest.mark.realdata
def test_the_real_sets() -> None:
    sets = {pairs.name: pairs for pairs in find_sets(Path(os.environ["CAPT_DATA"]) / "wordsim")}
    sizes = {name: len(pairs) for name, pairs in sets.items()}
    assert sizes == {
        "MC-30": 30, "MTurk-287": 287, "MTurk-771": 771, "RG-65": 65, "RW-STANFORD": 2034, "SimVerb-3500": 3500,
        "VERB-143": 144, "WS-353-ALL": 353, "WS-353-REL": 252, "WS-353-SIM": 203, "YP-130": 130,
    }  # fmt: skip
    assert all(not word.endswith("\r") for pairs in sets.values() for word in (*pairs.first, *pairs.second))
    gold = sets["MC-30"].gold
    angles = np.arccos(gold / 4.0)  # a plane of its own for each pair, whose cosine is the score: rho is 100
    words = tuple(f"{side}{i}" for i in range(30) for side in "ab")
    matrix = np.zeros((60, 60), dtype=np.float32)
    for i, angle in enumerate(angles):
        matrix[2 * i, 2 * i], matrix[2 * i + 1, 2 * i : 2 * i + 2] = 1, (np.cos(angle), np.sin(angle))
    perfect = WordPairs("p", words[::2], words[1::2], gold)
    assert score_set(WordVectors(words, matrix), perfect).drop == pytest.approx(100)
    assert all(a.name <= b.name for a, b in pairwise(sets.values()))
