from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capt.pretrain.data.corpus import PASSAGE, CorpusPart, row_pieces
from tests.unit.data.doubles import ListCorpus, documents

LONG = " ".join(f"word{i}" for i in range(3000))


@pytest.mark.parametrize(
    "text", ["short", LONG, LONG.replace(" ", "\n"), "x" * (3 * PASSAGE + 1), "a\n" * PASSAGE + "b"]
)
def test_passages_are_short_and_join_to_their_document(text: str) -> None:
    passages = list(ListCorpus([text, "next"]))
    assert all(0 < len(passage.text) <= PASSAGE for passage in passages)
    assert [passage.starts for passage in passages] == [True] + [False] * (len(passages) - 2) + [True]
    assert list(documents(ListCorpus([text, "next"]))) == [text, "next"]


@given(st.lists(st.text(alphabet="ab \n", min_size=1, max_size=3 * PASSAGE).filter(str.strip), min_size=1, max_size=4))
def test_documents_survive_cutting(texts: list[str]) -> None:
    assert list(documents(ListCorpus(texts))) == [text.rstrip() for text in texts]


def test_passages_end_where_a_line_or_word_ends() -> None:
    lines = "\n".join(["word " * 20] * 200)
    for passage in list(ListCorpus([lines]))[1:]:
        assert passage.text[0] == "\n"
    for passage in list(ListCorpus([LONG]))[1:]:
        assert passage.text[:5] == " word"


def test_blank_rows_are_left_out() -> None:
    assert list(row_pieces(["a", "", " \n", "b\n"], None)) == [("a\n", True), ("b\n", True)]


def test_parts_cover_the_corpus_without_overlap() -> None:
    corpus = ListCorpus([f"document {i}" for i in range(2000)])
    train = list(documents(CorpusPart(corpus, 0.1, held_out=False)))
    held_out = list(documents(CorpusPart(corpus, 0.1, held_out=True)))
    assert sorted(train + held_out) == sorted(corpus.texts)
    assert len(held_out) == pytest.approx(200, abs=50)


def test_held_out_text_does_not_depend_on_the_order() -> None:
    texts = [f"document {i}" for i in range(500)]
    forward, backward = (
        set(documents(CorpusPart(ListCorpus(["first", *order]), 0.1, held_out=True))) for order in (texts, texts[::-1])
    )
    assert forward == backward


def test_the_first_passage_is_always_training_text() -> None:
    for text in (f"document {i}" for i in range(200)):
        assert list(documents(CorpusPart(ListCorpus([text]), 0.5, held_out=False))) == [text]


def test_a_hole_in_a_document_ends_it() -> None:
    corpus = ListCorpus([LONG])
    train = list(CorpusPart(corpus, 0.4, held_out=False))
    whole = list(corpus)
    assert 1 < len(train) < len(whole)
    for before, after in pairwise(train):
        neighbours = [p.text for p in whole].index(after.text) == [p.text for p in whole].index(before.text) + 1
        assert after.starts != neighbours
