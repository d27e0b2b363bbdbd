"""The predictions of a model as its benchmark takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune.objective import RowResults
from finetune.visual.config import VisualData
from finetune.visual.gqa import write_gqa
from finetune.visual.nlvr import Version, write_nlvr
from finetune.visual.rows import PictureRows
from finetune.visual.vqa import write_vqa
from pretrain.vision_language.data.answers import AnswerTable
from pretrain.vision_language.data.examples import Example
from pretrain.vision_language.data.gqa import GqaQuestion, read_gqa_questions


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
    if answers is None:
        truths = {str(row.id): bool(choice) for row, choice in zip(rows.examples, chosen, strict=True)}
        version: Version = "nlvr1" if data.task == "nlvr1" else "nlvr2"
        return write_nlvr(truths, out, [str(row.id) for row in rows.examples], version)
    texts = {row.id: answers.answers[choice] for row, choice in zip(rows.examples, chosen, strict=True)}
    if data.task == "vqa":
        return write_vqa(texts, out, [row.id for row in rows.examples])
    return write_gqa({str(key): text for key, text in texts.items()}, out, _questions(rows.examples, files))


def _questions(examples: Sequence[Example], files: Sequence[Path]) -> list[GqaQuestion]:
    if files:
        return [question for file in files for question in read_gqa_questions(file)]
    return [
        GqaQuestion(str(row.id), row.pictures[0], row.text, _best(row.answers), True, (), row.kind) for row in examples
    ]


def _best(answers: Mapping[str, float] | None) -> str | None:
    return max(answers, key=answers.__getitem__) if answers else None
