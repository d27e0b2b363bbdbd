"""GQA: accuracy and consistency as the official evaluator computes them, and the result file as the server takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from finetune.predictions import write_checked
from finetune.visual.dumps import coverage_problems, predictions_of, read_rows, write_rows
from pretrain.base.errors import DataError, counted
from pretrain.vision_language.data.gqa import GqaQuestion


def gqa_scores(predictions: Mapping[str, str], questions: Sequence[GqaQuestion]) -> dict[str, float]:
    """``accuracy`` and, where it can be computed, ``consistency``, from 0 to 1.

    Accuracy is the part of the balanced questions whose prediction is the answer, letter by letter. Consistency looks
    at each balanced question that is right and entails others: it is the mean over these of the part of the entailed
    questions that is right too. It needs answer and prediction of every entailed question, which the balanced files do
    not have (the ``all`` files do); without them, or where no question entails any, it is absent.

    Raises:
        DataError: no balanced question has an answer, or one has no prediction.
    """
    answers = {question.id: question.answer for question in questions}
    scored = [question for question in questions if question.balanced and question.answer is not None]
    if not scored:
        raise DataError("no balanced question has an answer; there is nothing to score")
    if missing := [question.id for question in scored if question.id not in predictions]:
        raise DataError(f"{counted(len(missing), 'balanced question')} without a prediction, such as {missing[0]!r}")
    right = [question for question in scored if predictions[question.id] == question.answer]
    scores = {"accuracy": len(right) / len(scored)}
    entailed = {question.id: [key for key in question.entailed if key != question.id] for question in scored}
    complete = all(answers.get(key) is not None and key in predictions for keys in entailed.values() for key in keys)
    parts = [
        float(np.mean([predictions[key] == answers[key] for key in entailed[question.id]]))
        for question in right
        if complete and entailed[question.id]
    ]
    if parts:
        scores["consistency"] = float(np.mean(parts))
    return scores


def write_gqa(predictions: Mapping[str, str], out: Path, questions: Sequence[GqaQuestion]) -> Path:
    """Write ``[{"questionId": str, "prediction": str}, ...]``, checked by `check_gqa` before it stands at ``out``.

    Raises:
        DataError: a balanced question has no prediction, or a prediction no question; nothing is written.
    """
    rows = ({"questionId": key, "prediction": answer} for key, answer in predictions.items())
    return write_checked(out, lambda file: write_rows(rows, file), lambda path: check_gqa(path, questions))


def check_gqa(path: Path, questions: Iterable[GqaQuestion]) -> list[str]:
    """What GQA's server would refuse in a result file, one line for each problem; empty for a valid one.

    It must be a JSON list of ``questionId`` (text, even though it is a number) and ``prediction`` (text), with every
    balanced question and no question of another set.

    Raises:
        DataError: the file is no JSON list.
    """
    questions = list(questions)
    rows, problems = read_rows(path, "questionId", "prediction", str)
    balanced = [question.id for question in questions if question.balanced]
    return problems + coverage_problems([key for key, _ in rows], [question.id for question in questions], balanced)


def read_gqa(path: Path) -> dict[str, str]:
    """The predictions of a result file. Raises ``DataError`` for one that is malformed."""
    return predictions_of(*read_rows(path, "questionId", "prediction", str), path)
