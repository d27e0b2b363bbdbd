"""GQA's accuracy and consistency on questions whose scores are worked out by hand, and the result file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from finetune.visual.config import TASKS
from finetune.visual.gqa import check_gqa, gqa_scores, read_gqa, write_gqa
from finetune.visual.objective import AnswerObjective
from finetune.visual.rows import PictureRows, SoftTargets
from pretrain.base.errors import DataError
from pretrain.vision_language.data.examples import Example
from pretrain.vision_language.data.gqa import GqaQuestion


def _question(key: str, answer: str | None, entailed: tuple[str, ...] = (), *, balanced: bool = True) -> GqaQuestion:
    return GqaQuestion(key, "n1", "Is it?", answer, balanced, entailed, "verify")


QUESTIONS = [
    _question("1", "yes", ("1", "2", "3")),  # entails 2 and 3; itself does not count
    _question("2", "red", ("4",)),
    _question("3", "no", balanced=False),
    _question("4", "left", ("1",)),
    _question("5", "man"),
]


def test_scores_by_hand() -> None:
    predictions = {"1": "yes", "2": "red", "3": "yes", "4": "right", "5": "Man"}
    scores = gqa_scores(predictions, QUESTIONS)
    assert scores["accuracy"] == 2 / 4, "1 and 2 of the four balanced; a capital makes another answer"
    assert scores["consistency"] == pytest.approx((1 / 2 + 0) / 2), "1: of 2 and 3 one is right; 2: 4 is wrong"


def test_accuracy_in_training_is_the_official_one() -> None:
    """Questions that are not balanced must count neither in the accuracy nor in its baseline."""
    answers = ["left", "man", "no", "red", "yes"]
    predictions = {"1": "yes", "2": "red", "3": "no", "4": "right", "5": "no"}
    index = {text: number for number, text in enumerate([*answers, "right"])}
    rows = object.__new__(PictureRows)  # metrics need neither texts nor regions
    rows.examples = [Example(row.id, ("n1",), row.text, counts=row.balanced) for row in QUESTIONS]
    rows.targets = SoftTargets.of([{str(row.answer): 1.0} for row in QUESTIONS], index)
    results = {"answer": np.array([index[predictions[row.id]] for row in QUESTIONS]), "loss": np.zeros(5)}
    metrics = AnswerObjective(TASKS["gqa"]).metrics(results, rows)
    assert metrics["accuracy"] == gqa_scores(predictions, QUESTIONS)["accuracy"] == 0.5
    assert metrics["baseline"] == 0.25


def test_consistency_is_absent_where_it_cannot_be_computed() -> None:
    predictions = {"1": "yes", "2": "red", "4": "right", "5": "man"}
    assert gqa_scores(predictions, QUESTIONS) == {"accuracy": 3 / 4}, "the entailed 3 has no prediction"
    assert set(gqa_scores(predictions, QUESTIONS[1:2])) == {"accuracy"}, "the entailed 4 is in another file"
    assert gqa_scores({"5": "man"}, QUESTIONS[4:]) == {"accuracy": 1.0}, "nothing is entailed"
    assert gqa_scores({**predictions, "3": "no", "1": "no", "2": "x"}, QUESTIONS) == {"accuracy": 1 / 4}
    with pytest.raises(DataError, match="1 balanced question without a prediction, such as '5'"):
        gqa_scores({"1": "", "2": "", "4": ""}, QUESTIONS)
    with pytest.raises(DataError, match="nothing to score"):
        gqa_scores({"1": "yes"}, [_question("1", None)])


def test_result_file(tmp_path: Path) -> None:
    out = write_gqa({"1": "yes", "2": "red", "4": "left", "5": "man"}, tmp_path / "o.json", QUESTIONS)
    assert json.loads(out.read_text())[0] == {"questionId": "1", "prediction": "yes"}
    assert check_gqa(out, QUESTIONS) == [], "3 is not balanced and may lack"
    assert read_gqa(out)["4"] == "left"
    with pytest.raises(DataError, match="1 question without a prediction: '5'"):
        write_gqa({"1": "yes", "2": "red", "4": "left"}, tmp_path / "p.json", QUESTIONS)
    out.write_text(json.dumps([{"questionId": 1, "prediction": "yes"}, {"questionId": "9", "prediction": "a"}]))
    assert check_gqa(out, QUESTIONS) == [
        "row 1: questionId is 1; it must be text",
        "1 question not in the questions: '9'",
        "4 questions without a prediction: '1', '2', '4', ...",
    ]
