"""Text becomes the same numbers whatever the number of workers and the form of the files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capt.pretrain.base.errors import DataError
from capt.pretrain.embeddings import corpus as module
from capt.pretrain.embeddings.config import DataSection
from capt.pretrain.embeddings.corpus import EncodedCorpus, open_corpus, split_punctuation
from capt.pretrain.embeddings.similarity import read_set
from capt.pretrain.embeddings.vectors import WordVectors, read_vectors, write_vectors
from tests.embeddings import write_text


def _data(folder: Path, *files: Path, **changes: object) -> DataSection:
    return DataSection.model_validate(
        {"files": [str(f) for f in files], "cache": folder / "cache", "min_count": 2, "workers": 1, **changes}
    )


def _sentences(corpus: EncodedCorpus) -> list[list[str]]:
    words, begins = corpus.slice(0, len(corpus))
    found: list[list[str]] = []
    for number, begin in zip(words.tolist(), begins.tolist(), strict=True):
        if begin:
            found.append([])
        found[-1].append(corpus.vocabulary.words[number])
    return found


def _by_hand(text: str, min_count: int) -> list[list[str]]:
    counts = Counter(text.lower().split())
    lines = [[w for w in line.split() if counts[w] >= min_count] for line in text.lower().split("\n")]
    return [line for line in lines if line]


def test_lines_are_sentences_without_rare_words(tmp_path: Path) -> None:
    text = "The cat sees\nthe  dog\n\nonce\n the DOG sees the cat \r\nthe cat"
    (tmp_path / "t.txt").write_text(text)
    corpus = open_corpus(_data(tmp_path, tmp_path / "t.txt"))
    assert _sentences(corpus) == _by_hand(text, 2)
    assert corpus.raw_words == 13
    assert corpus.sentences == 4
    kept = open_corpus(_data(tmp_path, tmp_path / "t.txt", lowercase=False))
    assert "DOG" not in kept.vocabulary.index
    assert open_corpus(_data(tmp_path, tmp_path / "t.txt", max_vocabulary=1)).vocabulary.words == ("the",)


BLANKS = " \t\n\r\v\f"
SPACES = [c for c in map(chr, range(0x10000)) if (c.isspace() or c in "\u200b\ufeff") and c not in BLANKS]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_text_and_vectors_are_split_by_one_rule(tmp_path: Path, suffix: str) -> None:
    """At the blanks of ASCII; every other space of Unicode is a character of the word, in text and in vectors."""
    words = [f"new{space}york" for space in SPACES]
    assert len(words) > 20
    lines = [blank.join(words) for blank in BLANKS]
    rows = [json.dumps({"text": line}) for line in lines] if suffix == ".jsonl" else lines
    (tmp_path / f"t{suffix}").write_text("\n".join(rows), encoding="utf-8", newline="\n")
    corpus = open_corpus(_data(tmp_path, tmp_path / f"t{suffix}", min_count=len(lines)))
    assert sorted(corpus.vocabulary.words) == sorted(words)
    assert corpus.raw_words == len(lines) * len(words)
    vectors = WordVectors(tuple(words), np.ones((len(words), 2), dtype=np.float32))
    for name, form in (("v.txt", "word2vec"), ("g.txt", "glove"), ("v.bin", "word2vec")):
        write_vectors(vectors, tmp_path / name, form, binary=name.endswith(".bin"))
        assert read_vectors(tmp_path / name).words == tuple(words)
    scored = "".join(f"{word} {other} 1.5\n" for word, other in pairwise(words))
    (tmp_path / "pairs.txt").write_text(scored, encoding="utf-8", newline="\n")
    assert read_set(tmp_path / "pairs.txt").first == tuple(words[:-1])


def test_a_long_line_is_cut_at_blanks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TASK", 50)
    (tmp_path / "t.txt").write_text("new\u00a0york a\u3000b " * 200, encoding="utf-8")
    assert sorted(open_corpus(_data(tmp_path, tmp_path / "t.txt")).vocabulary.words) == ["a\u3000b", "new\u00a0york"]


def test_prose_loses_its_punctuation_to_words_of_their_own(tmp_path: Path) -> None:
    hindi = "\u0939\u093f\u0928\u094d\u0926\u0940"  # with combining marks
    lines = ["The river, (the well-known) RIVER.", "\u201cDon't!\u201d 3.5\u20ac \u2026", f"{hindi}\u0964"]
    (tmp_path / "t.txt").write_text("\n".join(lines))
    data = _data(tmp_path, tmp_path / "t.txt", min_count=1, split="punctuation")
    assert _sentences(open_corpus(data)) == [
        ["the", "river", ",", "(", "the", "well-known", ")", "river", "."],
        ["\u201c", "don't", "!", "\u201d", "3.5", "\u20ac", "\u2026"],
        [hindi, "\u0964"],
    ]
    blanks = open_corpus(_data(tmp_path, tmp_path / "t.txt", min_count=1))
    assert "river," in blanks.vocabulary.index  # not taken from the cache of the other


@given(st.lists(st.text(min_size=1).filter(lambda word: word.split() == [word])))
def test_splitting_punctuation_loses_no_character_and_splits_once(words: list[str]) -> None:
    found = list(split_punctuation(words))
    assert "".join(found) == "".join(words)
    assert all(found)
    assert list(split_punctuation(found)) == found


def test_a_file_without_a_last_line_end_ends_its_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sees\nthe dog")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"cat and dog"))
    (tmp_path / "c.jsonl").write_text('{"text": "and the"}')
    files = [tmp_path / name for name in ("a.txt", "b.txt.gz", "c.jsonl")]
    corpus = open_corpus(_data(tmp_path, *files, min_count=1))
    assert _sentences(corpus) == [["the", "cat", "sees"], ["the", "dog"], ["cat", "and", "dog"], ["and", "the"]]


def test_any_number_of_workers_and_any_packing_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_text(tmp_path / "a.txt", 4000).read_text()
    half = text.index("\n", len(text) // 2) + 1
    packed, rows = tmp_path / "b.txt.gz", tmp_path / "c.jsonl"
    packed.write_bytes(gzip.compress(text[half:].encode()))
    rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in text[half:].splitlines()))
    (tmp_path / "a.txt").write_text(text[:half])
    whole = tmp_path / "whole.txt"
    whole.write_text(text)
    monkeypatch.setattr(module, "_TASK", 500)
    expected = _by_hand(text, 2)
    for files, workers, cache in (
        ((whole,), 1, "1"), ((tmp_path / "a.txt", packed), 1, "2"), ((tmp_path / "a.txt", rows), 2, "3"),
    ):  # fmt: skip
        monkeypatch.setattr(module, "_SMALL", 0)
        corpus = open_corpus(_data(tmp_path / cache, *files, workers=workers))
        assert _sentences(corpus) == expected
        assert corpus.raw_words == len(text.split())


def test_a_line_without_end_is_cut_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word{i % 7}" for i in range(3000)]
    (tmp_path / "t.txt").write_text(" ".join(words))
    monkeypatch.setattr(module, "_TASK", 5000)
    corpus = open_corpus(_data(tmp_path, tmp_path / "t.txt"))
    assert [w for sentence in _sentences(corpus) for w in sentence] == words
    monkeypatch.setattr(module, "_TASK", 1 << 20)
    monkeypatch.setattr(module, "LONGEST_SENTENCE", 1000)
    again = open_corpus(_data(tmp_path / "other", tmp_path / "t.txt"))
    assert [len(sentence) for sentence in _sentences(again)] == [1000, 1000, 1000]


def test_the_cache_goes_by_content(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt")
    first = open_corpus(_data(tmp_path, tmp_path / "a.txt"))
    (tmp_path / "moved.txt").write_bytes((tmp_path / "a.txt").read_bytes())
    folders = set((tmp_path / "cache" / "embeddings").iterdir())
    assert open_corpus(_data(tmp_path, tmp_path / "moved.txt")).fingerprint == first.fingerprint
    assert set((tmp_path / "cache" / "embeddings").iterdir()) == folders
    write_text(tmp_path / "a.txt", seed=1)
    assert open_corpus(_data(tmp_path, tmp_path / "a.txt")).fingerprint != first.fingerprint
    assert np.array_equal(first.words[:5], first.words[:5])


def test_a_damaged_cache_and_a_text_of_rare_words_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rare.txt").write_text("each word stands once\n")
    with pytest.raises(DataError, match=r"data\.min_count 2: no word of the 4 in the text"):
        open_corpus(_data(tmp_path, tmp_path / "rare.txt"))
    data = _data(tmp_path, write_text(tmp_path / "a.txt"))
    open_corpus(data)
    (words,) = (tmp_path / "cache" / "embeddings").glob("*/words.i32")
    whole = words.read_bytes()
    words.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match=r"words\.i32 is damaged: expected SHA-256"):
        open_corpus(data)
    words.write_bytes(whole[:-4])
    with pytest.raises(DataError, match=r"words\.i32 is damaged: 12032 bytes of .* are expected, found 12028"):
        open_corpus(data)
