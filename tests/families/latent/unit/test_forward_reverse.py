from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.latent.evaluation.forward_reverse import (
    SAMPLES,
    Estimator,
    as_scored,
    estimator,
    forward_perplexity,
    reverse_perplexity,
)
from capt.pretrain.latent.evaluation.text import MAX_WORDS
from capt.pretrain.latent.kenlm import find_programs
from capt.pretrain.latent.ngram import FALLBACK, Text, WordScores, estimate

TRAIN = [line.split() for line in (Path(__file__).parent / "lmplz" / "text.txt").read_text().splitlines()]


class Recorder:
    """A model that gives every word 1/10 and every end 1/1000, and keeps what it was shown."""

    def __init__(self) -> None:
        self.trained: list[Text] = []
        self.scored: list[Text] = []

    def estimate(self, text: Text) -> Recorder:
        self.trained.append(text)
        return self

    def score(self, text: Text) -> WordScores:
        self.scored.append(text)
        ends = np.concatenate([[False] * len(words) + [True] for words in text])
        unknown = np.concatenate([[word == "x" for word in words] + [False] for words in text])
        return WordScores(np.where(ends, -3.0, -1.0), unknown, ends)


def test_samples_are_cut_as_the_paper_cuts_them() -> None:
    assert MAX_WORDS == 80 - 2
    endless = ["w"] * 100
    assert as_scored([["a", "b", "</s>", "c"], ["</s>", "a"], [], endless, ["v"] * 78]) == [
        ["a", "b"],
        [],
        [],
        ["w"] * 78,
        ["v"] * 78,
    ]


def test_forward_trains_on_real_text_and_scores_samples() -> None:
    recorder = Recorder()
    found = forward_perplexity([["a", "x", "</s>"], []], TRAIN, recorder.estimate)
    assert recorder.trained == [TRAIN]
    assert recorder.scored == [[["a", "x"], []]]
    assert found.released == pytest.approx(10.0), "no end counts, the unknown word does"
    assert found.with_ends == pytest.approx(10 ** ((2 * 1 + 2 * 3) / 4))
    assert (found.words, found.unknown) == (2, 1)


def test_reverse_trains_on_samples_and_each_word_of_the_vocabulary() -> None:
    recorder = Recorder()
    real = {"train": TRAIN, "test": [["b"]]}
    found = reverse_perplexity([["b", "a", "</s>"]], ["<pad>", "<s>", "a", "b"], real, recorder.estimate)
    assert recorder.trained == [[["<pad>"], ["<s>"], ["a"], ["b"], ["b", "a"]]]
    assert recorder.scored == [TRAIN, [["b"]]]
    assert list(found) == ["train", "test"]
    assert found["test"].with_ends == pytest.approx(10 ** ((1 + 3) / 2))


def test_text_without_words_is_refused() -> None:
    recorder = Recorder()
    with pytest.raises(DataError, match="no generated sentence"):
        forward_perplexity([], TRAIN, recorder.estimate)
    with pytest.raises(DataError, match="no word to score"):
        forward_perplexity([["</s>"]], TRAIN, estimator("builtin", Path()))


def test_order_and_discounts_are_the_papers() -> None:
    samples = TRAIN[:20]
    found = forward_perplexity(samples, TRAIN, estimator("builtin", Path()))
    scores = estimate(TRAIN, order=5, fallback=FALLBACK).score(samples)
    assert found.released == 10 ** -scores.log10[~scores.is_end].mean()


def test_collapsed_samples_read_well_and_cover_little() -> None:
    build = estimator("builtin", Path())
    vocabulary = sorted({word for sentence in TRAIN for word in sentence})
    varied, collapsed = TRAIN[:30], [TRAIN[5]] * 30
    held_out = {"test": TRAIN[30:]}
    assert forward_perplexity(collapsed, TRAIN, build).released < forward_perplexity(varied, TRAIN, build).released * 2
    reverse = [reverse_perplexity(s, vocabulary, held_out, build)["test"].released for s in (varied, collapsed)]
    assert reverse[1] > 1.5 * reverse[0]


def test_kenlm_is_not_replaced_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make kenlm"):
        estimator("kenlm", tmp_path, programs=tmp_path)


def test_both_estimators_give_the_same_figures(tmp_path: Path) -> None:
    try:
        find_programs()
    except ConfigError as error:
        pytest.skip(str(error))
    vocabulary = ["<pad>", "<unk>", "<s>", "</s>", *sorted({word for sentence in TRAIN for word in sentence})]

    def figures(name: Estimator) -> list[float]:
        build = estimator(name, tmp_path)
        forward = build(TRAIN)  # must stay itself when another model is estimated in the same folder
        reverse = reverse_perplexity(TRAIN[:20], vocabulary, {"train": TRAIN}, build)["train"]
        scores = forward.score(TRAIN[:20])
        return [scores.perplexity(ends=False), reverse.released, reverse.with_ends]

    assert figures("kenlm") == pytest.approx(figures("builtin"), rel=1e-5)


@pytest.mark.realdata
@pytest.mark.skipif("CAPT_DATA" not in os.environ, reason="CAPT_DATA is not set: no Penn Treebank text")
def test_penn_treebank_in_seconds() -> None:
    """1,280 real sentences in the place of generated ones."""
    folder = Path(os.environ["CAPT_DATA"]) / "lm" / "ptb"
    text = {
        name: [line.split() for line in (folder / f"ptb.{name}.txt").read_text().splitlines()]
        for name in ("train", "valid", "test")
    }
    vocabulary = ["<pad>", "<s>", "</s>", *sorted({word for sentence in text["train"] for word in sentence})]
    start = time.process_time()
    build = estimator("builtin", folder)
    forward = forward_perplexity(text["valid"][:SAMPLES], text["train"], build)
    reverse = reverse_perplexity(text["valid"][:SAMPLES], vocabulary, {k: text[k] for k in ("train", "test")}, build)
    assert time.process_time() - start < 30
    assert reverse["test"].words == 82_430 - 3_761
    # every word is in the vocabulary that the reverse model is shown, so what is unknown is <unk>
    assert reverse["test"].unknown == sum(words.count("<unk>") for words in text["test"])
    assert forward.released < reverse["test"].released < reverse["train"].released * 2
