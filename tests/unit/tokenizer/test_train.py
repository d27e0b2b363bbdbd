from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor

from capt.pretrain.base.errors import ConfigError, DataError
from capt.tokenizer import train as module
from capt.tokenizer.encode import load_tokenizer
from capt.tokenizer.special import SpecialIds
from capt.tokenizer.train import _cut, train
from tests.unit.tokenizer.corpus import docstrings


def small() -> tuple[str, ...]:
    return docstrings()[:400]


def test_the_folder_and_the_ids(trained: Path) -> None:
    assert sorted(p.name for p in trained.iterdir()) == [
        "sentencepiece.model",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokenizer = load_tokenizer(trained)
    assert tokenizer.special == SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=4)
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    assert [tokenizer.backend.id_to_token(i) for i in range(6)] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<0x00>"]
    assert tokenizer.vocab_size == 1500
    assert SentencePieceProcessor(model_file=str(trained / "sentencepiece.model")).get_piece_size() == 1500


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_training_is_deterministic(tmp_path: Path, kind: Any) -> None:
    reports = [train(small(), tmp_path / n, vocab_size=900, type=kind) for n in ("a", "b")]
    assert reports[0].lines == reports[1].lines > 1000
    assert reports[0].checked >= 1000
    for file in ("sentencepiece.model", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_sample_is_bounded_seeded_and_streamed(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> str:
        corpus = itertools.chain.from_iterable(itertools.repeat(small(), 3))
        report = train(corpus, tmp_path / name, vocab_size=600, type="bpe", max_sentences=500, seed=seed)
        assert report.used == 500
        assert report.sentences >= report.lines > 2000
        return hashlib.sha256((tmp_path / name / "sentencepiece.model").read_bytes()).hexdigest()

    assert digest("a", 0) == digest("b", 0) != digest("c", 1)


def test_a_sample_is_uniform() -> None:
    counts = [0] * 20
    for seed in range(2000):
        sample = module._Sample(5, random.Random(seed))
        for i in range(20):
            sample.add(str(i))
        kept = [int(s) for s in sample.sentences()]
        assert kept == sorted(kept)
        assert len(set(kept)) == 5
        for i in kept:
            counts[i] += 1
    assert all(400 < count < 600 for count in counts)  # 500 expected, 5 standard deviations are 97


def test_nothing_but_a_line_feed_ends_a_line() -> None:
    sample = module._Sample(9, random.Random(1))
    sample.add("one\u2028 two\x85\x1c\r\nthree\rfour\n\n")
    assert sample.sentences() == ["one\u2028 two\x85\x1c", "three\rfour"]


def test_long_lines_are_cut_and_not_dropped(tmp_path: Path) -> None:
    """SentencePiece drops a sentence over its limit silently: with one line only, there would be nothing left."""
    report = train([" ".join(small()).replace("\n", " ")], tmp_path / "t", vocab_size=600)
    assert report.lines == 1
    assert report.sentences > 50


@pytest.mark.parametrize(
    "line", ["word " * 100, "x" * 999, "日本語" * 50, "a " + "日" * 60 + " b", "  two  spaces " * 9]
)
def test_cut_keeps_every_word(line: str) -> None:
    parts = _cut(line, 40)
    assert all(0 < len(part.encode()) <= 40 for part in parts)
    assert "".join(parts).replace(" ", "") == line.replace(" ", "")
    words = [word for word in line.split() if len(word.encode()) <= 20]
    assert [w for p in parts for w in p.split() if w in words] == words
    assert _cut("short", 40) == ["short"]


def test_no_byte_fallback_means_unknowns(tmp_path: Path) -> None:
    train(small(), tmp_path / "t", vocab_size=600, byte_fallback=False)
    tokenizer = load_tokenizer(tmp_path / "t")
    (ids,) = tokenizer.encode_batch(["snow ☃ man"])
    assert tokenizer.special.unk in ids.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; it must be 1 or more"),
        ({"vocab_size": 300}, "vocab_size=300 is too small .* at least 3[5-9][0-9]"),
        ({"type": "word"}, "type 'word' is not known; choose one of unigram, bpe"),
        ({"normalization": "nfd"}, "normalization 'nfd' is not known; choose one of nmt_nfkc,"),
        ({"character_coverage": 99.95}, "character_coverage is 99.95"),
        ({"max_sentences": -1}, "max_sentences is -1"),
        ({"threads": 0}, "threads is 0"),
        ({"model_max_length": 0}, "model_max_length is 0"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small(), tmp_path / "t", **{"vocab_size": 900, **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_too_little_text_says_what_works(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(
        DataError, match=r"vocab_size=50000 \(tokenizer\.vocab_size of a job, .*; the largest that works is \d+"
    ) as error:
        train(small()[:40], tmp_path / "t", vocab_size=50_000, type=kind)
    train(small()[:40], tmp_path / "t", vocab_size=int(str(error.value).split()[-1]), type=kind)


@pytest.mark.parametrize("texts", [[], ["", " \n\t "]])
def test_no_text(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(DataError, match="no text in it"):
        train(texts, tmp_path / "t", vocab_size=900)
    assert list(tmp_path.iterdir()) == []


def test_a_lone_surrogate_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2 of the corpus is not valid Unicode"):
        train(["fine", "not \ud800 fine"], tmp_path / "t", vocab_size=900)


def test_an_error_of_the_corpus_comes_through(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield "some text"
        raise DataError("shard 7 is damaged")

    with pytest.raises(DataError, match="shard 7 is damaged"):
        train(texts(), tmp_path / "t", vocab_size=900)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_left_alone(tmp_path: Path, trained: Path) -> None:
    before = (trained / "tokenizer.json").read_bytes()
    with pytest.raises(DataError, match="already exists"):
        train(small(), trained, vocab_size=900)
    assert (trained / "tokenizer.json").read_bytes() == before


def test_an_export_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capt.tokenizer.pieces.NEVER_IN_TEXT", 0.0)  # control pieces now match text, in the export only
    with pytest.raises(
        DataError, match=r"does not tokenize like SentencePiece, so nothing was written: \d of 2021 lines"
    ):
        train(small(), tmp_path / "t", vocab_size=900)
    assert list(tmp_path.iterdir()) == []


def test_scores_of_equal_segmentations_tie(tmp_path: Path) -> None:
    """Rows of one character have many segmentations of equal score; SentencePiece and the export take the same."""
    rows = [character * n for n in range(1, 90) for character in "=-#."]
    train([*small(), *rows * 3], tmp_path / "t", vocab_size=900)
    processor = SentencePieceProcessor(model_file=str(tmp_path / "t" / "sentencepiece.model"))
    texts = [a + " " + b for a, b in itertools.product(rows, ["", "=" * 41, "-" * 77])]
    for text, ids in zip(texts, load_tokenizer(tmp_path / "t").encode_batch(texts), strict=True):
        assert ids.tolist() == processor.encode(text), text
