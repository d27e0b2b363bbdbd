"""Check a result file against the questions it answers, whichever of the four tasks these belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from finetune.visual.gqa import check_gqa, gqa_scores, read_gqa
from finetune.visual.nlvr import Version, check_nlvr, nlvr_scores, read_nlvr
from finetune.visual.vqa import check_vqa, read_vqa, soft_accuracy, vqa_accuracy
from pretrain.base.errors import DataError
from pretrain.vision_language.data import vqa
from pretrain.vision_language.data.files import Document
from pretrain.vision_language.data.gqa import gqa_questions
from pretrain.vision_language.data.read import Task, examples_of, read_documents, task_of


class Checked(NamedTuple):
    """What a result file turned out to be.

    Attributes:
        task: ``vqa``, ``gqa``, ``nlvr2`` or ``nlvr1``.
        questions: how many were asked.
        problems: what the benchmark would refuse, one line each.
        scores: the official metrics, from 0 to 1; empty where there are problems, or no answers.
    """

    task: Task
    questions: int
    problems: list[str]
    scores: dict[str, float]


def check_predictions(path: Path, data: Sequence[Path]) -> Checked:
    """Check a result file, and score it where the data hold the answers.

    Args:
        path: the result file.
        data: the files of one split: questions, and of VQA the annotations if there are any.

    Raises:
        DataError: a file is damaged, the data are of no task or of several, or the result file has another form.
    """
    documents = read_documents(data, what="--data")
    tasks = {task_of(document) for document in documents}
    if len(tasks) != 1 or None in tasks:
        found = ", ".join(sorted(task or "captions" for task in tasks))
        raise DataError(f"--data: {found}; give the questions or statements of one of vqa, gqa, nlvr2 and nlvr1")
    task = tasks.pop()
    assert task is not None
    if task == "vqa":
        return _vqa(path, documents)
    return _gqa(path, documents) if task == "gqa" else _nlvr(path, documents, task)


def _vqa(path: Path, documents: list[Document]) -> Checked:
    annotations = vqa.read_annotations(document for document in documents if vqa.is_annotations(document))
    examples = examples_of(documents, what="--data")

    def score() -> dict[str, float]:
        predictions = read_vqa(path)
        if annotations:
            return vqa_accuracy(predictions, annotations).as_metrics()
        return {"accuracy": soft_accuracy(predictions, examples)}

    problems = check_vqa(path, [example.id for example in examples])
    return _checked("vqa", len(examples), problems, any(example.answers is not None for example in examples), score)


def _gqa(path: Path, documents: list[Document]) -> Checked:
    questions = [question for document in documents for question in gqa_questions(document)]
    labelled = any(question.balanced and question.answer is not None for question in questions)
    problems = check_gqa(path, questions)
    return _checked("gqa", len(questions), problems, labelled, lambda: gqa_scores(read_gqa(path), questions))


def _nlvr(path: Path, documents: list[Document], task: Version) -> Checked:
    examples = examples_of(documents, what="--data")
    problems = check_nlvr(path, [example.id for example in examples], task)
    labelled = any(example.truth is not None for example in examples)
    return _checked(task, len(examples), problems, labelled, lambda: nlvr_scores(read_nlvr(path, task), examples, task))


def _checked(
    task: Task, questions: int, problems: list[str], labelled: bool, score: Callable[[], dict[str, float]]
) -> Checked:
    return Checked(task, questions, problems, score() if labelled and not problems else {})
