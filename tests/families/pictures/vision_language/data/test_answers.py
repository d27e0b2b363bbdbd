"""Answer tables, normalisation and VQA's soft scores, against literal rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.vision_language.data.answers import (
    AnswerTable,
    build_table,
    convert_ans,
    coverage,
    load_table,
    log_coverage,
    normalise,
    normalise_answer,
    vqa_soft_score,
)
from capt.pretrain.vision_language.data.examples import Example
from tests.families.pictures.vision_language.data import forms


def _literal_score(count: int, annotators: int) -> float:
    """Leave each annotator out in turn; a match counts a third, at most one."""
    given = [True] * count + [False] * (annotators - count)
    scores = []
    for left_out in range(annotators):
        others = [given[i] for i in range(annotators) if i != left_out]
        scores.append(min(1.0, sum(others) / 3.0))
    return sum(scores) / len(scores)


def test_soft_scores_of_ten_annotators_are_the_official_ones() -> None:
    assert [vqa_soft_score(count) for count in range(11)] == [0.0, 0.3, 0.6, 0.9, *[1.0] * 7]


@pytest.mark.parametrize("annotators", [1, 2, 3, 5, 10, 13])
def test_soft_scores_are_the_literal_rule(annotators: int) -> None:
    for count in range(annotators + 1):
        assert vqa_soft_score(count, annotators) == pytest.approx(_literal_score(count, annotators), abs=1e-15)
    with pytest.raises(ValueError, match="annotators"):
        vqa_soft_score(annotators + 1, annotators)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("A Man.", "man"),
        ("the woman", "woman"),
        ("Ten", "10"),
        ("grey", "gray"),
        ("an an apple", "an apple"),
        ("a the end", "end"),  # one article of each kind, in the order a, an, the
        ("the a end", "a end"),
        ("", ""),
        (".", ""),
        ("zero", "zero"),  # unlike in VQA
        ("yes. ", "yes. "),  # only a period at the very end
        ("theatre", "theatre"),
    ],
)
def test_convert_ans(given: str, expected: str) -> None:
    assert convert_ans(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("The Cat", "cat"),
        ("none", "0"),
        ("ten", "10"),
        ("eleven", "eleven"),
        ("t-shirt", "t shirt"),  # a mark between letters becomes a blank
        ("yes, sir", "yes sir"),  # one beside a blank goes
        ("a-b, c-d", "b c d"),  # what decides for "-" is "-" alone
        ("red -blue-green", "red bluegreen"),  # ... beside a blank anywhere
        ("1,000", "1000"),  # a comma between digits removes all marks
        ("1,000 t-shirts", "1000 tshirts"),
        ("3.5", "3.5"),  # a period before a digit stays
        ("a.m.", "am"),
        (".5", ".5"),
        ("5.", "5"),  # the evaluator means to keep a period after a digit, and does not
        ("." * 40, "." * 8),  # 32 periods go, no more
        ("dont", "don't"),
        ("couldnt've", "couldn't've"),
        ("couldn'tve", "couldn't've"),
        ("yalld've", "yalld've"),  # two apostrophes lack; the table knows words that lack one
        ("y'alld've", "y'all'd've"),
        ("somebody'd", "somebodyd"),  # upside down in the official table
        ("Im", "im"),  # its capitals are never met: the text is in lower case by then
        ("what's up?", "what's up"),
        ("an", ""),
    ],
)
def test_normalise(given: str, expected: str) -> None:
    assert normalise(given) == expected


def test_the_vocabulary_drops_the_commas_that_are_left() -> None:
    assert (normalise("a'b"), normalise_answer("1 ,2")) == ("a'b", "1 2")


TABLES: list[Any] = [
    ["yes", "", "no"],
    [{"ans": "yes", "dsets": ["vqa"]}, {"ans": "", "dsets": []}, {"ans": "no", "dsets": ["gqa"]}],
    {"no": 2, "yes": 0, "": 1},
]


@pytest.mark.parametrize("value", TABLES)
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_tables_of_three_forms(tmp_path: Path, value: Any, name: str) -> None:
    table = load_table(forms.write(tmp_path / name, value))
    assert table.answers == ("yes", "", "no")
    assert table.index == {"yes": 0, "": 1, "no": 2}
    table.save(tmp_path / "saved.json")
    assert load_table(tmp_path / "saved.json") == table
    assert json.loads((tmp_path / "saved.json").read_text()) == ["yes", "", "no"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["yes", "no", "yes"], "the answer 'yes' occurs twice"),
        (["yes", 1], "answer 1: 1 is not a text"),
        ([{"ans": "yes"}, {}], "answer 1: None is not a text"),
        ({"yes": 1, "no": 2}, "are not the numbers 0 to 1"),
        ({"yes": True, "no": 0}, "are not the numbers 0 to 1"),
        ({"yes": "0"}, "are not the numbers"),
        ([], "an empty list"),
        ({}, "an empty"),
        ('["\\ud800"]', "answer 0: .* is not a text"),
        ("yes\nno\n", "not a table of answers"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    path = forms.write(tmp_path / "t.json", value)
    with pytest.raises(DataError, match=message) as caught:
        load_table(path)
    assert str(path) in str(caught.value)


def _examples() -> list[Example]:
    answers = [{"The Cat": 1.0, "dog": 0.3}, {"cat": 0.6}, {"dog": 0.9, "bird": 0.9}, {}, None]
    common = ["cat", "cat", None, None, None]
    return [
        Example(i, ("p",), "q", scores, answer=answer)
        for i, (scores, answer) in enumerate(zip(answers, common, strict=True))
    ]


def test_a_table_counts_one_answer_of_each_question() -> None:
    assert build_table(_examples(), 1).answers == ("cat", "dog")  # dog is the first of the best of the third
    assert build_table(_examples(), 2).answers == ("cat",)
    with pytest.raises(DataError, match=r"with 3 questions \(the most frequent is 'cat'\); set data.minimum_answers"):
        build_table(_examples(), 3)
    with pytest.raises(DataError, match="there is none at all"):
        build_table(_examples()[3:], 1)


def test_answers_outside_the_table_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    table = AnswerTable(("cat", "bird"))
    found = coverage(_examples(), table)
    assert found == (4, 2, 5, 3)  # questions, without any answer inside, answers, outside
    assert coverage(_examples(), table, convert_ans) == (4, 1, 5, 2)
    log_coverage("a.json", found, table)
    log_coverage("a.json", coverage(_examples()[1:2], table), table)
    (line,) = caplog.messages
    assert line == "a.json: 3 of 5 answers are not among the 2 of the table; 2 of 4 questions have none that is"


def test_scores_by_class() -> None:
    table = AnswerTable(("cat", "1"))
    assert table.scores({"The Cat": 1.0, "cat": 0.3, "dog": 0.9}) == {0: 0.3}
    assert table.scores({"The Cat": 1.0, "cat": 0.3, "one": 0.6}, convert_ans) == {0: 1.0, 1: 0.6}
