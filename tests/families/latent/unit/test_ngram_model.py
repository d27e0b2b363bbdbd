"""The back-off lookup of n-gram models, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.latent.ngram import FALLBACK, Level, NGramModel, estimate
from tests.families.latent.unit.arpa import read_arpa

SMALL = """\
comments may come first
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1\t<unk>
0\t<s>\t-0.5
-0.25\t</s>
-0.75\ta\t-0.125

\\2-grams:
-0.0625\t<s> a
-0.5\ta </s>

\\end\\
"""


def test_reads_and_scores_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "small.arpa"
    path.write_text(SMALL)
    scores = read_arpa(path).score([["a"], ["a", "a"], ["x"]])
    # <s> a, a </s> | <s> a, back-off of a + a, a </s> | back-off of <s> + <unk>, no back-off of <unk> + </s>
    assert scores.log10.tolist() == [-0.0625, -0.5, -0.0625, -0.125 - 0.75, -0.5, -0.5 - 1, -0.25]
    assert scores.is_end.tolist() == [False, True, False, False, True, False, True]
    assert scores.is_unknown.tolist() == [False] * 5 + [True, False]
    assert scores.perplexity(ends=True) == pytest.approx(10 ** (3.75 / 7))
    assert scores.perplexity(ends=False, unknown=False) == pytest.approx(10 ** (1.0 / 3))


def test_ngrams_over_the_start_of_a_sentence_are_never_used(tmp_path: Path) -> None:
    """Some tools count a text without breaking it into sentences."""
    path = tmp_path / "running.arpa"
    trigrams = "-0.1\t</s> <s>\t-0.2\n\n\\3-grams:\n-0.01\t</s> <s> a\n"
    path.write_text(SMALL.replace("ngram 2=2", "ngram 2=3\nngram 3=1").replace("a </s>\n", f"a </s>\n{trigrams}"))
    assert read_arpa(path).score([["a"], ["a"]]).log10.tolist() == [-0.0625, -0.5, -0.0625, -0.5]


def test_a_level_without_ngrams_changes_no_score() -> None:
    model = estimate([["a"]], order=5, fallback=FALLBACK)
    assert [len(level.keys) for level in model.levels] == [4, 2, 1, 0, 0]
    shorter = NGramModel(model.words, model.levels[:3])
    text = [["a", "a"], [], ["x", "a"]]
    assert model.score(text).log10.tolist() == shorter.score(text).log10.tolist()
    assert model.order == 5
    assert shorter.order == 3


def test_rows_are_found_by_their_keys() -> None:
    level = Level(np.array([2, 5, 9]), np.zeros(3), np.zeros(3))
    assert level.find(np.array([5, 2, 9, 0, 7, 10])).tolist() == [1, 0, 2, -1, -1, -1]
    assert Level(np.array([], dtype=np.int64), np.zeros(0), np.zeros(0)).find(np.array([0, 1])).tolist() == [-1, -1]


def test_words_begin_with_the_special_ones() -> None:
    levels = [Level(np.arange(4), np.zeros(4), np.zeros(4))]
    assert NGramModel(["<unk>", "<s>", "</s>", "a"], levels).words == ("<unk>", "<s>", "</s>", "a")
    with pytest.raises(AssertionError):
        NGramModel(["<s>", "<unk>", "</s>", "a"], levels)
    with pytest.raises(AssertionError):
        NGramModel(["<unk>", "<s>", "</s>"], levels)


def test_of_a_context_the_longest_known_part_counts(tmp_path: Path) -> None:
    """p(a | <s> a a): neither "a a a" nor "a a" is listed, so both back-off weights and the unigram are added up."""
    path = tmp_path / "small.arpa"
    path.write_text(SMALL)
    model = read_arpa(path)
    assert model.words == ("<unk>", "<s>", "</s>", "a")
    assert model.score([["a", "a", "a"]]).log10.tolist() == [-0.0625, -0.875, -0.875, -0.5]
    assert model.score([[]]).log10.tolist() == [-0.5 - 0.25], "back-off of <s>, then </s>"
    both = model.score([["a"], ["a"]])
    assert both.log10.tolist() == model.score([["a"]]).log10.tolist() * 2
    assert both.is_end.sum() == 2
    assert not both.is_unknown.any()
