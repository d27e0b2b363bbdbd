"""Words, counts, noise and subsampling against the formulas of word2vec."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.embeddings.corpus import WordVocabulary

COUNTS = {"b": 7, "a": 7, "rare": 1, "the": 100, "ä": 5}


def test_most_frequent_first_and_ties_by_text() -> None:
    vocabulary = WordVocabulary.of(COUNTS, 5)
    assert vocabulary.words == ("the", "a", "b", "ä")
    assert vocabulary.counts.tolist() == [100, 7, 7, 5]
    assert vocabulary.index["b"] == 2
    assert WordVocabulary.of(COUNTS, 1, 2).words == ("the", "a")


def test_noise_is_the_counts_to_the_power_of_three_quarters() -> None:
    noise = WordVocabulary.of(COUNTS, 5).noise()
    total = 100**0.75 + 2 * 7**0.75 + 5**0.75
    np.testing.assert_allclose(noise, [100**0.75 / total, 7**0.75 / total, 7**0.75 / total, 5**0.75 / total])
    np.testing.assert_allclose(WordVocabulary.of(COUNTS, 5).noise(0.0), [0.25] * 4)


def test_subsampling_is_that_of_word2vec() -> None:
    """gensim: (sqrt(count / t) + 1) * (t / count) with t = sample * words, at most 1."""
    vocabulary = WordVocabulary.of(COUNTS, 5)
    threshold = 0.05 * 119
    expected = [min(1.0, (math.sqrt(c / threshold) + 1) * (threshold / c)) for c in (100, 7, 7, 5)]
    np.testing.assert_allclose(vocabulary.keep_probability(0.05), expected)
    assert expected[0] < 1 == expected[3]
    assert vocabulary.keep_probability(0.0).tolist() == [1, 1, 1, 1]


def test_a_saved_vocabulary_is_read_back(tmp_path: Path) -> None:
    vocabulary = WordVocabulary.of({**COUNTS, "x\u2028y"[:1]: 9, "#": 8, '"': 6}, 1)
    vocabulary.save(tmp_path / "vocabulary.txt")
    read = WordVocabulary.load(tmp_path / "vocabulary.txt")
    assert read.words == vocabulary.words
    assert read.counts.tolist() == vocabulary.counts.tolist()
    assert read.fingerprint == vocabulary.fingerprint


def test_words_beside_the_text_are_kept_whatever_they_hold(tmp_path: Path) -> None:
    """Words of files of vectors may hold spaces, as a few of GloVe's do, and any other character but a line feed."""
    others = [". . .", "at name@domain.com", " ", "3", "a\u2028b", "\t", "x\ry", "\x85", "0 0"]
    vocabulary = WordVocabulary.of(COUNTS, 5)
    both = vocabulary.with_others(others)
    both.save(tmp_path / "vocabulary.txt")
    read = WordVocabulary.load(tmp_path / "vocabulary.txt")
    assert read.words == (*vocabulary.words, *others)
    assert (read.words_of_text, read.fingerprint) == (len(vocabulary), both.fingerprint)
    assert both.noise()[len(vocabulary) :].tolist() == [0] * len(others)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 3\nword\n", r"line 2: 'word' is not"),
        ("the three\n", r"line 1: 'the three' is not"),
        ("a 3\na 2\n", r"line 2: the word 'a' occurs there twice"),
        ("a b 3\n", r"line 1: 'a b 3' is not"),
    ],
)
def test_damaged_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "v.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        WordVocabulary.load(tmp_path / "v.txt")
