"""VQA's accuracy against the official rule written out, and the result file with its validator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.finetune.visual.vqa import (
    answer_accuracy,
    check_vqa,
    read_vqa,
    soft_accuracy,
    vqa_accuracy,
    write_vqa,
)
from capt.pretrain.base.errors import DataError
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.vqa import Annotation


def _literal(prediction: str, answers: list[str]) -> float:
    """For answers that normalisation leaves as they are."""
    total = np.float64(0)
    for left_out in range(len(answers)):
        others = answers[:left_out] + answers[left_out + 1 :]
        total += min(1.0, sum(answer == prediction for answer in others) / 3)
    return float(total / len(answers))


@pytest.mark.parametrize("count", range(11))
def test_accuracy_of_each_count(count: int) -> None:
    answers = ["cat"] * count + ["dog"] * (10 - count)
    expected = [0.0, 0.3, 0.6, 0.9, *[1.0] * 7][count]
    assert answer_accuracy("cat", answers) == expected
    assert answer_accuracy("cat", answers) == pytest.approx(_literal("cat", answers), abs=1e-12)


def test_normalised_only_where_annotators_disagree() -> None:
    assert answer_accuracy("The Cat.", ["cat"] * 10) == 0.0
    assert answer_accuracy("The Cat.", ["cat"] * 9 + ["dog"]) == 1.0
    assert answer_accuracy("two", ["2"] * 2 + ["two"] * 2 + ["three"] * 6) == 1.0
    assert answer_accuracy(" a\tcat\n", ["a cat"] * 10) == 1.0, "blanks at the ends, tabs and line ends never count"
    assert answer_accuracy("cat", ["cat "] * 5 + ["cat"] * 5) == 1.0, "nor do they make a disagreement"


def _annotations() -> dict[int, Annotation]:
    rows = [
        (1, ["yes"] * 10, "yes/no", "is the"),
        (2, ["2"] * 4 + ["3"] * 6, "number", "how many"),
        (3, ["red"] * 2 + ["blue"] * 8, "other", "what color"),
        (4, ["no"] * 10, "yes/no", "is the"),
    ]
    return {key: Annotation(key, tuple(answers), kind, words, None, None) for key, answers, kind, words in rows}


def test_means_by_type() -> None:
    scores = vqa_accuracy({1: "yes", 2: "two", 3: "red", 4: "yes", 99: "foreign"}, _annotations())
    assert scores.accuracy == pytest.approx((1 + 1 + 0.6 + 0) / 4)
    means = {kind: value for kind, (value, _) in scores.answer_types.items()}
    assert means == pytest.approx({"number": 1.0, "other": 0.6, "yes/no": 0.5})
    means = {kind: value for kind, (value, _) in scores.question_types.items()}
    assert means == pytest.approx({"how many": 1.0, "is the": 0.5, "what color": 0.6})
    assert [count for _, count in scores.question_types.values()] == [1, 2, 1]
    assert set(scores.figures().scores) == {"accuracy", "accuracy_number", "accuracy_other", "accuracy_yes_no"}
    with pytest.raises(DataError, match="2 questions without a prediction, such as 3"):
        vqa_accuracy({1: "yes", 2: "2"}, _annotations())
    with pytest.raises(DataError, match="nothing to score"):
        vqa_accuracy({}, {})


def test_soft_accuracy_of_lxmerts_labels() -> None:
    examples = [
        Example(1, ("p",), "q", {"yes": 1.0}),
        Example(2, ("p",), "q", {"cat": 0.3, "dog": 0.9}),
        Example(3, ("p",), "q", {}),
        Example(4, ("p",), "q"),
    ]
    assert soft_accuracy({1: "yes", 2: "cat", 3: "x"}, examples) == pytest.approx(1.3 / 3)
    with pytest.raises(DataError, match="question 3 without a prediction"):
        soft_accuracy({1: "yes", 2: "cat"}, examples)
    with pytest.raises(DataError, match="nothing to score"):
        soft_accuracy({}, examples[3:])


def test_written_file_is_the_official_form(tmp_path: Path) -> None:
    out = write_vqa({7: "yes", 5: "café"}, tmp_path / "o.json", [5, 7])
    assert json.loads(out.read_text()) == [{"question_id": 7, "answer": "yes"}, {"question_id": 5, "answer": "café"}]
    assert read_vqa(out) == {7: "yes", 5: "café"}
    with pytest.raises(DataError, match="1 question without a prediction: 6"):
        write_vqa({5: "yes", 7: "no"}, tmp_path / "new.json", [5, 6, 7])
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"], "a refused file leaves nothing"


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([(1, "a"), (2, "b"), (3, "c"), (2, "d")], "1 question twice: 2"),
        ([(1, "a"), (2, "b"), (3, "c"), (9, "d"), (8, "e")], "2 questions not in the questions: 9, 8"),
        ([(1, "a")], "2 questions without a prediction: 2, 3"),
        ([(1, "a"), (2, "b"), ("3", "c")], "row 3: question_id is '3'; it must be a number"),
        ([(1, "a"), (2, "b"), (True, "c")], "row 3: question_id is True; it must be a number"),
        ([(1, "a"), (2, 5), (3, "c")], "row 2: answer is 5; it must be text"),
    ],
)
def test_validator(tmp_path: Path, rows: list[tuple[Any, Any]], problem: str) -> None:
    path = tmp_path / "o.json"
    path.write_text(json.dumps([{"question_id": key, "answer": answer} for key, answer in rows]))
    assert problem in check_vqa(path, [1, 2, 3])


def test_validator_bounds_what_it_says_and_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(json.dumps([{"id": 1}] * 100))
    problems = check_vqa(path, range(1000))
    assert len(problems) == 5
    assert problems[3:] == ["97 more rows are wrong", "1,000 questions without a prediction: 0, 1, 2, ..."]
    with pytest.raises(DataError, match="row 1"):
        read_vqa(path)
    path.write_text('{"question_id": 1, "answer": "a"}')
    with pytest.raises(DataError, match="not a JSON list"):
        check_vqa(path, [1])
