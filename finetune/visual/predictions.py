"""The predictions of a model as its benchmark takes them, and the check of a result file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capt.finetune.evaluation import RowResults
from capt.finetune.visual.config import TASKS, VisualData
from capt.finetune.visual.dumps import Checked, result_file
from capt.finetune.visual.rows import PictureRows
from capt.pretrain.base.errors import DataError
from capt.pretrain.vision_language.data.answers import AnswerTable
from capt.pretrain.vision_language.data.read import read_documents, task_of


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
