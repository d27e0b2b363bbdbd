"""Neighbours and analogies against a literal float64 search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.embeddings.neighbors import neighbors, read_ranks
from capt.pretrain.embeddings.similarity import score_analogies
from capt.pretrain.embeddings.vectors import WordVectors

RNG = np.random.default_rng(3)
VECTORS = WordVectors(tuple(f"w{i}" for i in range(60)), RNG.standard_normal((60, 7)).astype(np.float32) * 3)


def unit(row: int) -> np.ndarray:
    vector = VECTORS.matrix[row].astype(np.float64)
    return vector / np.sqrt(vector @ vector)


def test_neighbours_are_those_of_the_literal_search() -> None:
    order = sorted((i for i in range(60) if i != 4), key=lambda i: -(unit(i) @ unit(4)))
    near, far = neighbors(VECTORS, "W4", [range(1, 6), range(45, 51)])
    assert [n.word for n in near] == [f"w{i}" for i in order[:5]]
    assert [n.word for n in far] == [f"w{i}" for i in order[44:50]]  # ranks 45 to 50, both ends included
    assert [n.rank for n in far] == [45, 46, 47, 48, 49, 50]
    assert near[0].cosine == pytest.approx(unit(order[0]) @ unit(4), abs=1e-6)


def test_ranks_beyond_the_last_word_are_left_out() -> None:
    (found,) = neighbors(VECTORS, "w0", [range(58, 70)])
    assert [n.rank for n in found] == [58, 59]
    zero = WordVectors(("a", "b", "c"), np.array([[0, 0], [1, 0], [0, 1]], dtype=np.float32))
    assert [n.cosine for n in neighbors(zero, "a", [range(1, 3)])[0]] == [0, 0]


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_the_length_of_the_vectors_does_not_matter(size: float, tmp_path: Path) -> None:
    """Float32 has no room for the squares of such numbers."""
    scaled = WordVectors(VECTORS.words, (VECTORS.matrix * np.float32(size)).astype(np.float32))
    for found, expected in zip(
        neighbors(scaled, "w4", [range(1, 60)])[0], neighbors(VECTORS, "w4", [range(1, 60)])[0], strict=True
    ):
        assert (found.rank, found.word) == (expected.rank, expected.word)
        assert found.cosine == pytest.approx(expected.cosine, abs=1e-6)
    path = tmp_path / "questions.txt"
    path.write_text("".join(f"w{a} w{a + 1} w{a + 2} w{literal_answer(a, a + 1, a + 2)}\n" for a in range(20)))
    assert score_analogies(scaled, path)["total"]["right"] == 20


def test_unknown_words_and_ranks_are_refused() -> None:
    with pytest.raises(DataError, match=r"no vector for 'w600' among 60 words; did you mean 'w"):
        neighbors(VECTORS, "w600", [range(1, 3)])
    assert read_ranks("45-50") == range(45, 51)
    for text in ("0-5", "5-4", "5", "a-b", "1-99999999999"):
        with pytest.raises(ConfigError, match="FIRST-LAST"):
            read_ranks(text)


def literal_answer(a: int, b: int, c: int) -> int:
    """3CosAdd by a loop over all words."""
    wanted = unit(b) - unit(a) + unit(c)
    scores = {i: float(wanted @ unit(i)) for i in range(60) if i not in (a, b, c)}
    return max(scores, key=lambda i: scores[i])


def test_analogies_against_the_literal_search(tmp_path: Path) -> None:
    asked = [tuple(int(x) for x in RNG.choice(60, 3, replace=False)) for _ in range(20)]
    lines = [": first"]
    for number, (a, b, c) in enumerate(asked):
        right = literal_answer(a, b, c)
        answer = right if number % 2 == 0 else next(i for i in range(60) if i not in (a, b, c, right))
        lines.append(f"W{a} w{b} w{c} w{answer}")
        if number == 9:
            lines += ["w1 w2 w3 unknown", ": second part", ""]
    path = tmp_path / "questions.txt"
    path.write_text("\r\n".join(lines))
    results = score_analogies(VECTORS, path)
    assert list(results) == ["first", "second part", "total"]
    assert [results[name]["questions"] for name in results] == [11, 10, 21]
    assert [results[name]["covered"] for name in results] == [10, 10, 20]
    assert [results[name]["right"] for name in results] == [5, 5, 10]
    assert results["first"]["accuracy_covered"] == 50
    assert results["first"]["accuracy_all"] == pytest.approx(500 / 11)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (": s\nw1 w2 w3\n", "line 2: 3 words; a question has four"),
        (": s\n", "holds no question"),
        (": s\nw1 w2 w3 w4\n:  s\n", "line 3: the name 's' is that of a section above"),
        (": total\nw1 w2 w3 w4\n", "line 1: the name 'total' is that of the sums"),
        ("a b c d\n", "none of the 1 questions has vectors for all four words"),
    ],
)
def test_bad_questions_are_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        score_analogies(VECTORS, path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
