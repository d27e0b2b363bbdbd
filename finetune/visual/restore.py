"""A fine-tuned model back from a checkpoint, which needs nothing beside itself but the region store."""

from __future__ import annotations

from pathlib import Path

from finetune.restore import FineTuned, load_fine_tuned
from finetune.visual.config import VisualJob
from finetune.visual.module import PictureClassifier
from pretrain.base.errors import CheckpointError, DataError
from pretrain.vision_language.data.answers import AnswerTable, load_table

ANSWERS = "answers.json"
"""The answer table in a checkpoint of a task of questions."""

FineTunedLxmert = FineTuned[VisualJob, PictureClassifier]
"""A checkpoint of a ``visual`` job, loaded."""


def classifier(job: VisualJob, answers: AnswerTable | None) -> PictureClassifier:
    """A freshly initialised model for a job whose encoder is known."""
    assert job.model.encoder is not None, "VisualJob.with_encoder fills it in"
    outputs = 2 if answers is None else len(answers)
    return PictureClassifier(job.model.encoder, outputs, job.data.visual_task.pictures)


def load_visual(path: Path) -> FineTunedLxmert:
    """Load a checkpoint of a ``visual`` job, or the best one of a run, after verifying every file.

    Raises:
        CheckpointError: nothing is there, it is damaged, or it is the checkpoint of another kind of job.
    """
    return load_fine_tuned(path, VisualJob, "visual", _build)


def read_answers(job: VisualJob, checkpoint: Path) -> AnswerTable | None:
    """The answer table of a checkpoint; None for statements. Raises ``CheckpointError`` where it is damaged."""
    if not job.data.visual_task.answers:
        return None
    try:
        return load_table(checkpoint / ANSWERS)
    except (DataError, FileNotFoundError) as error:
        raise CheckpointError(f"{checkpoint}: no usable answer table: {error}") from None


def _build(job: VisualJob, checkpoint: Path) -> PictureClassifier:
    if job.model.encoder is None:
        raise CheckpointError(f"{checkpoint / 'config.yaml'}: model.encoder is not set; every visual checkpoint has it")
    return classifier(job, read_answers(job, checkpoint))
