"""Check a result file against the questions it answers, whichever of the four tasks these belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from finetune.visual.dumps import Figures
from finetune.visual.gqa import check_gqa, gqa_scores, read_gqa
from finetune.visual.nlvr import Version, check_nlvr, nlvr_scores, read_nlvr
from finetune.visual.vqa import check_vqa, read_vqa, soft_accuracy, vqa_accuracy
from pretrain.base.errors import DataError
from pretrain.vision_language.data import vqa
from pretrain.vision_language.data.files import Document
from pretrain.vision_language.data.gqa import Choices, gqa_choices, gqa_questions, is_choices
from pretrain.vision_language.data.read import Task, examples_of, read_documents, task_of


class Checked(NamedTuple):
    """What a result file turned out to be.

    Attributes:
        task: ``vqa``, ``gqa``, ``nlvr2`` or ``nlvr1``.
        questions: how many the data have.
        predictions: how many of them have a prediction.
        unasked: predictions of other questions, which GQA's and NLVR's official scripts pass over.
        problems: what the benchmark would refuse, one line each.
        figures: of the official evaluator; empty where there are problems, or no answers.
    """

    task: Task
    questions: int
    predictions: int
    unasked: int
    problems: list[str]
    figures: Figures

    @property
    def scores(self) -> dict[str, float]:
        """The official metrics."""
        return self.figures.scores


def check_predictions(path: Path, data: Sequence[Path]) -> Checked:
    """Check a result file, and score it where the data hold the answers.

    Args:
        path: the result file.
        data: the files of one split: questions; of VQA the annotations and of GQA the choices, if there are any.

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

    def score(predictions: Mapping[int, str]) -> Figures:
        if annotations:
            return vqa_accuracy(predictions, annotations).figures()
        reason = "it needs the official annotations, which are not given"
        return Figures({"accuracy": soft_accuracy(predictions, examples)}, {"answer type": reason})

    ids = [example.id for example in examples]
    labelled = any(example.answers is not None for example in examples)
    return _checked("vqa", ids, check_vqa(path, ids), lambda: read_vqa(path), score if labelled else None)


def _gqa(path: Path, documents: list[Document]) -> Checked:
    choices: dict[str, Choices] = {}
    questions = []
    for document in documents:
        if is_choices(document):
            choices |= gqa_choices(document)
        else:
            questions += gqa_questions(document)
    if not questions:
        raise DataError(f"--data: {documents[0].path} holds choices; name the file of their questions as well")

    def score(predictions: Mapping[str, str]) -> Figures:
        return gqa_scores(predictions, questions, choices or None)

    labelled = any(question.balanced and question.answer is not None for question in questions)
    ids = [question.id for question in questions]
    problems = check_gqa(path, questions, only=False)
    return _checked("gqa", ids, problems, lambda: read_gqa(path), score if labelled else None)


def _nlvr(path: Path, documents: list[Document], task: Version) -> Checked:
    examples = examples_of(documents, what="--data")
    ids = [str(example.id) for example in examples]

    def score(predictions: Mapping[str, bool]) -> Figures:
        return Figures(nlvr_scores(predictions, examples, task))

    labelled = any(example.truth is not None for example in examples)
    problems = check_nlvr(path, ids, task, only=False)
    return _checked(task, ids, problems, lambda: read_nlvr(path, task), score if labelled else None)


def _checked(
    task: Task,
    ids: Sequence[Any],
    problems: list[str],
    read: Callable[[], Mapping[Any, Any]],
    score: Callable[[Any], Figures] | None,
) -> Checked:
    if problems:
        return Checked(task, len(ids), 0, 0, problems, Figures({}))
    predictions = read()
    known = set(ids)
    unasked = sum(key not in known for key in predictions)
    figures = Figures({}) if score is None else score(predictions)
    return Checked(task, len(ids), len(predictions) - unasked, unasked, [], figures)
