"""Result files of questions and statements: written from predictions, read, and checked against what was asked."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast, runtime_checkable

from capt.finetune.evaluation import RowResults
from capt.finetune.visual.config import TASKS, VisualData, VisualTask
from capt.finetune.visual.rows import PictureRows
from capt.pretrain.base.errors import DataError, counted, shown
from capt.pretrain.vision_language.data.answers import AnswerTable
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document, read_document
from capt.pretrain.vision_language.data.read import read_documents, task_of

LARGEST = 1 << 28
"""Bytes of a result file at most: the 448,000 answers to VQA's test set have 20 MB."""

_SHOWN = 3


def read_rows(path: Path, id_key: str, answer_key: str, id_type: type) -> tuple[list[tuple[Any, str]], list[str]]:
    """The rows of a JSON list of objects, and the problems of those that are none, one line each.

    Raises:
        DataError: the file is not a JSON list.
    """
    document = read_document(path, limit=LARGEST)
    if document.table or document.lines is not None:
        raise DataError(f'{path}: not a JSON list of {{"{id_key}": ..., "{answer_key}": ...}}')
    kind = "a number" if id_type is int else "text"
    rows, problems = [], []
    for i, row in enumerate(document.rows):
        if not isinstance(row, dict) or not {id_key, answer_key} <= row.keys():
            problems.append(f"row {i + 1}: {shown(row)} has not both {id_key} and {answer_key}")
        # Not isinstance: True is an int as well, but no id.
        elif type(row[id_key]) is not id_type:
            problems.append(f"row {i + 1}: {id_key} is {shown(row[id_key])}; it must be {kind}")
        elif not isinstance(row[answer_key], str):
            problems.append(f"row {i + 1}: {answer_key} is {shown(row[answer_key])}; it must be text")
        else:
            rows.append((row[id_key], row[answer_key]))
    return rows, cut(problems)


@dataclass(frozen=True)
class Figures:
    """The figures of an official evaluator for a result file.

    Attributes:
        scores: by name; from 0 to 1 except for GQA's ``distribution``.
        missing: why a figure of the evaluator is missing, by its name.
        details: scores and numbers of questions, by what questions are grouped by and by their group.
    """

    scores: dict[str, float]
    missing: dict[str, str] = field(default_factory=dict)
    details: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)


class Checked(NamedTuple):
    """The outcome of the check of a result file.

    Attributes:
        task: a key of `capt.finetune.visual.config.TASKS`.
        questions: how many the data have.
        predictions: how many of them have a prediction.
        unasked: predictions of other questions, which GQA's and NLVR's official scripts pass over.
        problems: what the benchmark would refuse, one line each.
        figures: of the official evaluator; empty where there are problems, or no answers.
    """

    task: str
    questions: int
    predictions: int
    unasked: int
    problems: list[str]
    figures: Figures

    @property
    def scores(self) -> dict[str, float]:
        """The official metrics."""
        return self.figures.scores


def checked(
    task: str,
    ids: Sequence[Any],
    problems: list[str],
    read: Callable[[], Mapping[Any, Any]],
    score: Callable[[Any], Figures] | None,
) -> Checked:
    """Read and score a result file that has no problems; ``score`` is None where the data hold no labels."""
    if problems:
        return Checked(task, len(ids), 0, 0, problems, Figures({}))
    predictions = read()
    known = set(ids)
    unasked = sum(key not in known for key in predictions)
    figures = Figures({}) if score is None else score(predictions)
    return Checked(task, len(ids), len(predictions) - unasked, unasked, [], figures)


@runtime_checkable
class ResultFile(Protocol):
    """The module of a task's result file (`capt.finetune.visual.config.VisualTask.results`)."""

    def check(self, path: Path, documents: list[Document], task: str) -> Checked:
        """Check a result file against the documents of its questions, and score it where these hold the answers."""

    def write(
        self, predictions: Mapping[Any, Any], examples: Sequence[Example], files: Sequence[Path], out: Path, task: str
    ) -> Path:
        """Write predictions, by id, in the official format. Raises ``DataError`` for what ``check`` would refuse."""


@runtime_checkable
class StatementFile(ResultFile, Protocol):
    """A result file of statements, whose metrics of validation are the official ones."""

    def scores(self, predictions: Mapping[str, bool], examples: Iterable[Example], task: str) -> dict[str, float]:
        """The metrics of predictions by identifier."""


def result_file(task: VisualTask) -> ResultFile:
    """The module of a task's result file."""
    return cast(ResultFile, importlib.import_module(task.results))


def by_group(scores: Iterable[tuple[Any, float | bool]]) -> dict[str, tuple[float, int]]:
    """The mean score and the number of scores of each group, groups in order; None is no group."""
    groups: dict[Any, list[float]] = {}
    for group, score in scores:
        if group is not None and group != "":
            groups.setdefault(group, []).append(score)
    return {str(group): (sum(groups[group]) / len(groups[group]), len(groups[group])) for group in sorted(groups)}


def coverage_problems(
    ids: Sequence[Any], known: Iterable[Any], required: Iterable[Any] | None = None, *, only: bool = True
) -> list[str]:
    """Ids that are doubled, unknown or missing, one line for each kind with their number and the first of them.

    Args:
        ids: those of the result file.
        known: all that it may hold.
        required: those that must; None for all of ``known``.
        only: whether ids that are not known are a problem.
    """
    known, given = dict.fromkeys(known), Counter(ids)  # in the order of the questions
    found = {
        "twice": [key for key, count in given.items() if count > 1],
        "not in the questions": [key for key in given if only and key not in known],
        "without a prediction": [key for key in (known if required is None else required) if key not in given],
    }
    return [f"{counted(len(keys), 'question')} {what}: {_first(keys)}" for what, keys in found.items() if keys]


def cut(problems: list[str]) -> list[str]:
    """The first problems, and how many more there are."""
    more = len(problems) - _SHOWN
    return problems if more <= 0 else [*problems[:_SHOWN], f"{more:,} more rows are wrong"]


def write_rows(rows: Iterable[Mapping[str, object]], file: IO[bytes]) -> None:
    """Write rows as a JSON list, one row a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    file.write(f"[{lines}]\n".encode())


def predictions_of(rows: Sequence[tuple[Any, str]], problems: list[str], path: Path) -> dict[Any, str]:
    """The predictions by id. Raises ``DataError`` with the problems where there are any."""
    if problems:
        raise DataError(f"{path}: {'; '.join(problems)}")
    return dict(rows)


def _first(keys: Sequence[Any]) -> str:
    return ", ".join(shown(key) for key in keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")


# The predictions of a model as its benchmark takes them, and the check of a result file.


def write_dump(
    results: RowResults,
    rows: PictureRows,
    data: VisualData,
    answers: AnswerTable | None,
    out: Path,
    files: Sequence[Path] = (),
) -> Path:
    """Write what was predicted of each row, in the official format of the task, checked by its validator.

    Args:
        results: ``answer`` of each row, from the task's objective.
        rows: the data set.
        data: names the task.
        answers: what the classes of a task of questions are.
        out: the file.
        files: that the rows were read from; GQA's say which questions must be answered.

    Raises:
        DataError: the validator found problems; nothing is written.
    """
    chosen = [int(answer) for answer in results["answer"]]
    predictions: dict[Any, Any]
    if answers is None:
        predictions = {str(row.id): bool(choice) for row, choice in zip(rows.examples, chosen, strict=True)}
    else:
        predictions = {row.id: answers.answers[choice] for row, choice in zip(rows.examples, chosen, strict=True)}
    return result_file(data.visual_task).write(predictions, rows.examples, files, out, data.task)


# Check a result file against the questions it answers, whichever task these belong to.


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
        raise DataError(f"--data: {found}; give the questions or statements of one of {', '.join(TASKS)}")
    task = tasks.pop()
    assert task is not None
    return result_file(TASKS[task]).check(path, documents, task)
