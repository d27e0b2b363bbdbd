from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from capt.launcher.commands.data import _filters
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.data.filters import (
    DocumentFilters,
    filters_of,
    is_repetitive,
    repeated_ngrams,
    repeated_parts,
    top_ngram,
)

PROSE = (
    "The harbour was quiet when the last boat came in.\nNobody had expected rain, yet the stones were dark with it, "
    "and two children carried a lamp along the wall.\nLater a door opened; somebody laughed, and the smell of bread "
    "went up the street as far as the old mill."
)


def test_shares_of_repetition_by_hand() -> None:
    assert repeated_parts(["aa", "b", "aa", "aa", "c"]) == (2 / 5, 4 / 8)
    words = ["to", "be", "or", "not", "to", "be", "that", "is"]
    assert top_ngram(words, 2) == 2 * 4 / sum(map(len, words))
    assert top_ngram(words, 3) == 0.0
    assert top_ngram(["a"], 2) == 0.0
    words = ["a", "b", "c", "d", "e", "x", "a", "b", "c", "d", "e", "f"]
    assert repeated_ngrams(words, 5) == 10 / 12
    assert repeated_ngrams([*"aaaaaa"], 5) == 1.0
    assert repeated_ngrams([*"abcdef"], 5) == 0.0


@pytest.mark.parametrize(
    ("text", "is_repeated"),
    [
        (PROSE, False),
        ("\n".join([PROSE.split("\n")[0]] * 4 + PROSE.split("\n")), True),  # lines
        (PROSE + "\n\n" + PROSE, True),  # a paragraph
        ("good morning " * 3 + PROSE[:100], True),  # a pair of words
        (PROSE + " " + PROSE[:200], True),  # a long sequence of words
        ("one word", False),
        ("", False),
    ],
)
def test_repetition(text: str, is_repeated: bool) -> None:
    assert is_repetitive(text) is is_repeated


def test_words() -> None:
    filters = filters_of(DocumentFilters(min_words=2, max_words=3))
    left_out = [[name for name, leaves_out in filters.items() if leaves_out("x " * n)] for n in range(1, 5)]
    assert left_out == [["min_words"], [], [], ["max_words"]]
    assert all(
        list(DocumentFilters.model_fields).index(a) < list(DocumentFilters.model_fields).index(b)
        for a, b in pairwise(filters)
    )


def test_languages() -> None:
    pytest.importorskip("py3langid", reason="needs the package py3langid, of the extra prepare")
    leaves_out = filters_of(DocumentFilters(languages=("en", "fr")))["languages"]
    assert not leaves_out(PROSE)
    assert not leaves_out("Le petit village se trouve au bord de la mer, où les bateaux arrivent le matin.")
    assert leaves_out("Das kleine Dorf liegt am Meer, und die Boote kommen am Morgen zurück.")
    with pytest.raises(DataError, match="languages: xx is unknown; known: ace, af, am"):
        filters_of(DocumentFilters(languages=("xx",)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"min_words": 5, "max_words": 4}, "min_words 5 is more than max_words 4"),
        ({"languages": "English"}, "'English' is not a code of ISO 639"),
        ({"near": 0.1}, "greater than or equal to 0.5"),
        ({"min_wrods": 4}, "Extra inputs are not permitted"),
    ],
)
def test_filters_that_cannot_be_meant(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DocumentFilters.model_validate(keys)


def test_filters_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "steps.yaml"
    file.write_text("min_words: 50\nlanguages: [en, de]\nexact: true\n")
    declared = _filters(file, ["min_words=20", "near=0.8", "languages=fr"])
    assert declared == DocumentFilters(min_words=20, languages=("fr",), exact=True, near=0.8)
    assert declared.names == ["min_words", "languages", "exact", "near"]
    for filters, message in (
        (["min_words"], r"--filter min_words: write KEY=VALUE"),
        (["min_wrods=3"], r"--filter min_wrods=3: min_wrods: Extra inputs .* \(known keys: min_words, max_words"),
        (["near=2"], r"--filter near=2: near: Input should be less than or equal to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            _filters(None, filters)
