from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.latent.ngram import END, FALLBACK, SPECIAL, START, NGramModel, discounts, estimate
from tests.families.latent.unit.arpa import read_arpa

LMPLZ = Path(__file__).parent / "lmplz"
TINY = [["a", "b"], ["a", "c"]]


def sentences(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text(encoding="utf-8").splitlines()]


def probabilities(model: NGramModel, sentence: list[str]) -> list[float]:
    return [float(p) for p in 10.0 ** model.score([sentence]).log10]


def test_bigrams_by_hand() -> None:
    # adjusted unigram counts: a 1 (after <s>), b 1, c 1 (after a), </s> 2 (after b, c); total 5; words without <s>: 5
    gamma = (0.5 + 0.5 + 0.5 + 1.0) / 5
    unknown = gamma / 5
    a = b = c = (1 - 0.5) / 5 + gamma / 5
    end = (2 - 1.0) / 5 + gamma / 5
    assert a + b + c + end + unknown == pytest.approx(1.0)
    model = estimate(TINY, order=2, fallback=FALLBACK)
    a_after_start = (2 - 1.0) / 2 + 1.0 / 2 * a
    b_after_a = (1 - 0.5) / 2 + (0.5 + 0.5) / 2 * b
    end_after_b = (1 - 0.5) / 1 + 0.5 / 1 * end
    assert probabilities(model, ["a", "b"]) == pytest.approx([a_after_start, b_after_a, end_after_b])
    # not seen: the share of the discounts times the lower order; a word that is not known ends the context
    assert probabilities(model, ["c", "x", "b"]) == pytest.approx([1.0 / 2 * c, 0.5 / 1 * unknown, b, end_after_b])
    assert probabilities(model, []) == pytest.approx([1.0 / 2 * end])


def test_discounts_by_hand() -> None:
    counts = np.array([0, 0, 1, 1, 1, 1, 2, 2, 3, 4, 5, 9])  # n1 4, n2 2, n3 1, n4 1; Y = 4 / (4 + 2 * 2)
    found = discounts(counts)
    assert found is not None
    assert found.tolist() == pytest.approx([0, 1 - 2 * 0.5 * 2 / 4, 2 - 3 * 0.5 * 1 / 2, 3 - 4 * 0.5 * 1 / 1])
    assert discounts(np.array([1, 1, 2])) is None, "n3 is 0"
    assert discounts(np.array([1, 2, 3, 3, 3, 3, 3])) is None, "D2 is negative"


def reference_discounts(adjusted: list[int]) -> tuple[float, ...]:
    n1, n2, n3, n4 = (adjusted.count(k) for k in (1, 2, 3, 4))
    if n1 and n2 and n3:
        y = n1 / (n1 + 2 * n2)
        d = (0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        if min(d) >= 0:
            return d
    return (0.0, *FALLBACK)


def reference(text: list[list[str]], order: int) -> dict[tuple[str, ...], float]:
    """p of every n-gram of ``text``, by the formulas, one n-gram at a time."""
    padded = [["<s>", *(w for w in s if w not in SPECIAL), "</s>"] for s in text]
    count: Counter[tuple[str, ...]] = Counter()
    left: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for s in padded:
        for n in range(1, order + 1):
            for i in range(len(s) - n + 1):
                gram = tuple(s[i : i + n])
                if gram != ("<s>",):
                    count[gram] += 1
                    if i > 0:
                        left[gram].add(s[i - 1])
    words = {gram[0] for gram in count if len(gram) == 1}
    adjusted = {g: c if len(g) == order or g[0] == "<s>" else len(left[g]) for g, c in count.items()}
    d = [reference_discounts([a for g, a in adjusted.items() if len(g) == n]) for n in range(1, order + 1)]

    def p(gram: tuple[str, ...]) -> float:
        if not gram:
            return 1.0 / (len(words) + 1)
        seen = {g: a for g, a in adjusted.items() if len(g) == len(gram) and g[:-1] == gram[:-1]}
        total = sum(seen.values())
        subtracted = {g: d[len(gram) - 1][min(a, 3)] for g, a in seen.items()}
        gamma = sum(subtracted.values()) / total
        return (seen[gram] - subtracted[gram]) / total + gamma * p(gram[1:])

    return {gram: p(gram) for gram in count}


def stored(model: NGramModel) -> dict[tuple[str, ...], float]:
    grams: list[tuple[str, ...]] = [()]
    found = {}
    for level in model.levels:
        prefixes, words = np.divmod(level.keys, len(model.words))
        grams = [(*grams[p], model.words[w]) for p, w in zip(prefixes, words, strict=True)]
        found |= dict(zip(grams, (10.0**level.log10).tolist(), strict=True))
    return {gram: p for gram, p in found.items() if gram not in {("<s>",), ("<unk>",)}}


@pytest.mark.parametrize("order", [2, 3, 5])
def test_every_ngram_by_the_formulas(order: int) -> None:
    # "once" comes last and once, so that lmplz's rule for the n-gram that sorts last changes nothing
    text = [*sentences(LMPLZ / "text.txt")[:12], [], ["<unk>"], ["once"]]
    model = estimate(text, order, FALLBACK)
    assert stored(model) == pytest.approx(reference(text, order), rel=1e-9)


def sums(model: NGramModel, history: list[str]) -> float:
    words = [[*history, w] for w in (*model.words[3:], "zebra")]
    scores = model.score([*words, history]).log10
    places = np.arange(len(words)) * (len(history) + 2) + len(history)
    return float((10.0 ** scores[places]).sum() + 10.0 ** scores[-1])


@pytest.mark.parametrize("order", [2, 3, 5])
def test_probabilities_of_every_context_sum_to_1(order: int) -> None:
    text = sentences(LMPLZ / "text.txt")[:15]
    model = estimate(text, order, FALLBACK)
    contexts: set[tuple[str, ...]] = {()}
    for s in text:
        s = [w for w in s if w not in SPECIAL]
        contexts |= {tuple(s[i:j]) for i in range(len(s)) for j in range(i, min(i + order, len(s)) + 1)}
    assert len(contexts) > 60
    for context in contexts:
        assert sums(model, list(context)) == pytest.approx(1.0, abs=1e-9), f"after <s> {context}"
        # an unknown word hides <s>, so that the context itself is the longest one
        assert sums(model, ["zebra", *context]) == pytest.approx(1.0, abs=1e-9), context


def test_same_model_as_lmplz() -> None:
    """ExpectedFile from lmplz. This text's discounts differ by 0.98 without its rule for the n-gram that sorts last."""
    theirs = read_arpa(LMPLZ / "order3.arpa")
    ours = estimate(sentences(LMPLZ / "text.txt"), order=3)
    assert ours.words == theirs.words
    for mine, level in zip(ours.levels, theirs.levels, strict=True):
        assert np.array_equal(mine.keys, level.keys)
        assert np.allclose(mine.log10, level.log10, rtol=0, atol=1e-5)
        assert np.allclose(mine.backoff, level.backoff, rtol=0, atol=1e-5)


def test_special_words_in_the_text_are_white_space() -> None:
    with_them = estimate([["a", "<unk>", "b"], ["<s>", "a", "c", "</s>"]], order=2, fallback=FALLBACK)
    without = estimate(TINY, order=2, fallback=FALLBACK)
    assert with_them.words == without.words
    assert all(np.array_equal(a.log10, b.log10) for a, b in zip(with_them.levels, without.levels, strict=True))
    scores = without.score([["<unk>"]])
    assert scores.is_unknown.tolist() == [True, False], "in a scored text <unk> is a word, and an unknown one"


def test_start_is_a_context_and_never_a_word() -> None:
    model = estimate(TINY, order=3, fallback=FALLBACK)
    for level in model.levels[1:]:
        assert START not in level.keys % len(model.words)
    assert END not in model.levels[1].keys // len(model.words)
    assert model.levels[0].log10[START] == 0.0


def test_sentences_do_not_see_each_other() -> None:
    model = estimate(sentences(LMPLZ / "text.txt"), order=3)
    text = sentences(LMPLZ / "text.txt")[:9]
    alone = np.concatenate([model.score([s]).log10 for s in text])
    assert np.array_equal(model.score(text).log10, alone)


def test_what_cannot_be_estimated() -> None:
    with pytest.raises(DataError, match="1-gram discounts cannot be estimated"):
        estimate(TINY)
    with pytest.raises(DataError, match="no sentence"):
        estimate([])
    with pytest.raises(DataError, match="'a b' is not one word"):
        estimate([["a b"]], fallback=FALLBACK)
    with pytest.raises(ConfigError, match="order 1"):
        estimate(TINY, order=1)
    with pytest.raises(ConfigError, match="must be in"):
        estimate(TINY, fallback=(0.5, 2.5, 1.0))


def test_text_shorter_than_the_order() -> None:
    model = estimate([["a"], []], order=5, fallback=FALLBACK)
    assert [len(level.keys) for level in model.levels] == [4, 3, 1, 0, 0]
    assert sums(model, []) == pytest.approx(1.0)
    assert sums(model, ["a"]) == pytest.approx(1.0)


@pytest.mark.realdata
@pytest.mark.skipif("CAPT_DATA" not in os.environ, reason="CAPT_DATA is not set: no Penn Treebank text")
def test_penn_treebank_as_kenlm_counts_it() -> None:
    folder = Path(os.environ["CAPT_DATA"]) / "lm" / "ptb"
    train, test = sentences(folder / "ptb.train.txt"), sentences(folder / "ptb.test.txt")
    start = time.process_time()
    scores = estimate(train).score(test)
    assert time.process_time() - start < 30
    assert (len(scores.log10), int(scores.is_end.sum()), int(scores.is_unknown.sum())) == (82_430, 3_761, 4_794)
    # lmplz -o 5 --skip_symbols; query -v summary, of kenlm 0.3.0
    assert scores.perplexity(ends=True) == pytest.approx(265.4853859960473, rel=1e-6)
    assert scores.perplexity(ends=True, unknown=False) == pytest.approx(161.26359900465536, rel=1e-6)
    assert math.isclose(scores.perplexity(ends=False), 309.4876, rel_tol=1e-6)
