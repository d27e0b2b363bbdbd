"""The predictions of a model as its benchmark takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.objective import RowResults
from finetune.visual.config import VisualData
from finetune.visual.dumps import result_file
from finetune.visual.rows import PictureRows
from pretrain.vision_language.data.answers import AnswerTable


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
