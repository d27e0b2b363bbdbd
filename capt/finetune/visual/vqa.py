"""VQA v2: the accuracy of the official evaluator, and the result file as the server takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from capt.finetune.predictions import write_checked
from capt.finetune.visual.dumps import (
    Checked,
    Figures,
    by_group,
    checked,
    coverage_problems,
    predictions_of,
    read_rows,
    write_rows,
)
from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.vision_language.data.answers import normalise, vqa_soft_score
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document
from capt.pretrain.vision_language.data.read import examples_of
from capt.pretrain.vision_language.data.vqa import Annotation, is_annotations, read_annotations

_normalise = lru_cache(maxsize=1 << 16)(normalise)


class VqaScores(NamedTuple):
    """Accuracies from 0 to 1; the official evaluator shows them as percentages of two decimals.

    Attributes:
        accuracy: the mean over all questions.
        answer_types: the mean over those of each answer type (``yes/no``, ``number``, ``other``), and their number.
        question_types: the same for those that begin with the same words.
    """

    accuracy: float
    answer_types: dict[str, tuple[float, int]]
    question_types: dict[str, tuple[float, int]]

    def figures(self) -> Figures:
        """``accuracy``, and ``accuracy_yes_no`` and so on for the answer types."""
        types = {f"accuracy_{kind.replace('/', '_')}": value for kind, (value, _) in self.answer_types.items()}
        details = {"answer type": self.answer_types, "question type": self.question_types}
        return Figures({"accuracy": self.accuracy, **types}, {}, details)


def answer_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """The official accuracy of one prediction.

    Line ends and tabs become blanks and blanks at the ends go. Where the annotators do not all agree, the prediction
    and their answers are normalised; where they do, they are compared unchanged. The score is the mean over the
    annotators of ``min(1, matches among the others / 3)``.
    """
    *given, predicted = [text.replace("\n", " ").replace("\t", " ").strip() for text in (*answers, prediction)]
    if len(set(given)) > 1:
        given, predicted = [_normalise(answer) for answer in given], _normalise(predicted)
    return vqa_soft_score(given.count(predicted), len(given))


def vqa_accuracy(predictions: Mapping[Any, str], annotations: Mapping[int, Annotation]) -> VqaScores:
    """The official accuracy of predictions of all questions that are annotated.

    Raises:
        DataError: a question has no prediction; predictions of other questions do not count.
    """
    if missing := [key for key in annotations if key not in predictions]:
        raise DataError(f"{counted(len(missing), 'question')} without a prediction, such as {missing[0]}")
    if not annotations:
        raise DataError("no question is annotated; there is nothing to score")
    scores = [answer_accuracy(predictions[key], annotation.answers) for key, annotation in annotations.items()]
    kinds = [(annotation.answer_type, annotation.question_type) for annotation in annotations.values()]
    answer_types, question_types = (by_group(zip(names, scores, strict=True)) for names in zip(*kinds, strict=True))
    return VqaScores(_mean(scores), answer_types, question_types)


def soft_accuracy(predictions: Mapping[Any, str], examples: Iterable[Example]) -> float:
    """The mean score of the predictions in `Example.answers`, as LXMERT computes it from its own JSON.

    It compares answers unchanged and knows only those in the file, so it is at most the official accuracy. Examples
    without answers do not count. Raises ``DataError`` where none has answers or one has no prediction.
    """
    scores = []
    for example in examples:
        if example.answers is None:
            continue
        if example.id not in predictions:
            raise DataError(f"question {example.id} without a prediction")
        scores.append(example.answers.get(predictions[example.id], 0.0))
    if not scores:
        raise DataError("no question has answers; there is nothing to score")
    return _mean(scores)


def write_vqa(predictions: Mapping[Any, str], out: Path, expected: Iterable[int | str]) -> Path:
    """Write ``[{"question_id": int, "answer": str}, ...]``, checked by `check_vqa` before it is moved to ``out``.

    Raises:
        DataError: the predictions are not exactly those of the questions ``expected``; nothing is written.
    """
    wanted = list(expected)
    rows = ({"question_id": key, "answer": answer} for key, answer in predictions.items())
    return write_checked(out, lambda file: write_rows(rows, file), lambda path: check_vqa(path, wanted))


def check_vqa(path: Path, expected: Iterable[int | str]) -> list[str]:
    """List what VQA's server would refuse in a result file, one line for each problem.

    It must be a JSON list with one ``question_id`` (a number) and ``answer`` (text) for each question of the set.

    Raises:
        DataError: the file is not a JSON list.
    """
    rows, problems = read_rows(path, "question_id", "answer", int)
    return problems + coverage_problems([key for key, _ in rows], expected)


def read_vqa(path: Path) -> dict[int, str]:
    """The predictions of a result file. Raises ``DataError`` for one that is malformed."""
    return predictions_of(*read_rows(path, "question_id", "answer", int), path)


def _mean(scores: Sequence[float]) -> float:
    return float(np.mean(scores))


def check(path: Path, documents: list[Document], task: str) -> Checked:
    """Check and score a result file of VQA; the documents may hold its annotations."""
    annotations = read_annotations(document for document in documents if is_annotations(document))
    examples = examples_of(documents, what="--data")

    def score(predictions: Mapping[int, str]) -> Figures:
        if annotations:
            return vqa_accuracy(predictions, annotations).figures()
        reason = "it needs the official annotations, which are not given"
        return Figures({"accuracy": soft_accuracy(predictions, examples)}, {"answer type": reason})

    ids = [example.id for example in examples]
    labelled = any(example.answers is not None for example in examples)
    return checked(task, ids, check_vqa(path, ids), lambda: read_vqa(path), score if labelled else None)


def write(
    predictions: Mapping[Any, Any], examples: Sequence[Example], files: Sequence[Path], out: Path, task: str
) -> Path:
    """Write the answers of the questions ``examples``."""
    return write_vqa(predictions, out, [row.id for row in examples])
