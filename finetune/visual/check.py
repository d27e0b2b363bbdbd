"""Check a result file against the questions it answers, whichever task these belong to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.visual.config import TASKS
from finetune.visual.dumps import Checked, result_file
from pretrain.base.errors import DataError
from pretrain.vision_language.data.read import read_documents, task_of


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
