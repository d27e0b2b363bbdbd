"""GQA's accuracy and consistency on questions whose scores are worked out by hand, and the result file."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.finetune.visual.config import TASKS
from capt.finetune.visual.dumps import check_predictions
from capt.finetune.visual.gqa import check_gqa, gqa_scores, read_gqa, write_gqa
from capt.finetune.visual.objective import AnswerObjective
from capt.finetune.visual.rows import PictureRows, SoftTargets
from capt.pretrain.base.errors import DataError
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.gqa import GqaQuestion


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
    scores = gqa_scores(predictions, QUESTIONS).scores
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
    assert metrics["accuracy"] == gqa_scores(predictions, QUESTIONS).scores["accuracy"] == 0.5
    assert metrics["baseline"] == 0.25


def test_the_reason_is_said_where_consistency_cannot_be_computed() -> None:
    predictions = {"1": "yes", "2": "red", "4": "right", "5": "man"}
    for found, reason in (
        (gqa_scores(predictions, QUESTIONS), "1 of 4 entailed questions without prediction, such as '3'"),
        (gqa_scores(predictions, QUESTIONS[1:2]), "1 of 1 entailed question without answer, such as '4'"),
        (gqa_scores({"5": "man"}, QUESTIONS[4:]), "no question that is right entails another"),
        (gqa_scores({**predictions, "3": "no", "1": "no", "2": "x"}, QUESTIONS), "no question that is right entails"),
    ):
        assert "consistency" not in found.scores
        assert found.missing["consistency"].startswith(reason)
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


def _definition(questions: dict[str, Any], predictions: dict[str, str], choices: dict[str, Any]) -> dict[str, float]:
    """The figures of the official evaluator, question by question from their definition, as percentages like it."""
    lists: dict[str, list[float]] = defaultdict(list)
    gold: dict[str, list[str]] = defaultdict(list)
    given: dict[str, list[str]] = defaultdict(list)
    for key, question in questions.items():
        if not question["isBalanced"]:
            continue
        answer, guess, types = question["answer"], predictions[key], question["types"]
        lists["accuracy"].append(100.0 * (guess == answer))
        lists["open" if types["structural"] == "query" else "binary"].append(100.0 * (guess == answer))
        lists["structural type " + types["structural"]].append(100.0 * (guess == answer))
        lists["semantic type " + types["semantic"]].append(100.0 * (guess == answer))
        lists[f"words {len(question['question'].split())}"].append(100.0 * (guess == answer))
        texts = [f"{step['operation']}: {step['argument']}" for step in question["semantic"]]
        steps = [t for t in texts if "exist" not in t and "query: name" not in t and "choose name" not in t]
        lists[f"steps {len(steps)}"].append(100.0 * (guess == answer))
        for name, kind in (("validity", "valid"), ("plausibility", "plausible")):
            allowed = ["color", "material", "shape"] if "Common" in types["detailed"] else choices[key][kind]
            lists[name].append(100.0 * (guess in allowed))
        if question["groups"]["global"] is not None:
            gold[question["groups"]["global"]].append(answer)
            given[question["groups"]["global"]].append(guess)
        others = [other for other in question["entailed"] if other != key]
        if guess == answer and others:
            lists["consistency"].append(
                sum(100.0 * (predictions[other] == questions[other]["answer"]) for other in others) / len(others)
            )
    total = 0.0
    for group, answers in gold.items():
        distance = sum((given[group].count(a) - answers.count(a)) ** 2 / answers.count(a) for a in set(answers))
        total += distance * len(answers)
    figures = {name: sum(values) / len(values) for name, values in lists.items()}
    return {**figures, "distribution": total / sum(map(len, gold.values())) / 100}


@pytest.mark.parametrize("seed", range(20))
def test_every_figure_is_that_of_the_definition(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ids = [f"{number:07}" for number in range(60)]
    answers = ["yes", "no", "red", "color", "dog"]
    operations = ["select", "exist", "query", "choose name", "filter color"]
    questions = {
        key: {
            "imageId": rng.choice("abc"), "question": " ".join(["Is it"] + ["so"] * rng.randrange(4)) + "?",
            "answer": rng.choice(answers), "isBalanced": rng.random() < 0.6,
            "entailed": rng.sample(ids, rng.randrange(4)),
            "types": {"structural": rng.choice(["query", "verify", "choose"]), "semantic": rng.choice(["obj", "rel"]),
                      "detailed": rng.choice(["existC", "twoCommon"])},
            "groups": {"global": rng.choice([None, "animal", "food"])},
            "semantic": [{"operation": rng.choice(operations), "argument": rng.choice(["name", "dog"])}
                         for _ in range(rng.randrange(1, 5))],
        }
        for key in ids
    }  # fmt: skip
    choices = {key: {kind: rng.sample(answers, 3) for kind in ("valid", "plausible")} for key in ids}
    predictions = {key: rng.choice([questions[key]["answer"], *answers]) for key in ids}
    (tmp_path / "o.json").write_text(json.dumps([{"questionId": k, "prediction": v} for k, v in predictions.items()]))
    paths = [tmp_path / "questions.json", tmp_path / "choices.json"]
    paths[0].write_text(json.dumps(questions))
    paths[1].write_text(json.dumps(choices))
    figures = check_predictions(tmp_path / "o.json", paths).figures
    ours = {name: value if name == "distribution" else 100 * value for name, value in figures.scores.items()}
    ours |= {f"{what} {name}": 100 * value for what, groups in figures.details.items()
             for name, (value, _) in groups.items()}  # fmt: skip
    assert ours == pytest.approx(_definition(questions, predictions, choices))
    assert set(figures.missing) == {"grounding"}
    without = check_predictions(tmp_path / "o.json", paths[:1]).figures
    assert set(without.missing) == {"grounding", "validity", "plausibility"}
