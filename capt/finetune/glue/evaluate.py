"""``capt evaluate`` of a fine-tuned checkpoint: the metrics of its dev set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Num

from capt.finetune.evaluation import EvaluationSets, as_text, evaluate_command, results_of_all_rows
from capt.finetune.glue.config import GlueJob
from capt.finetune.glue.data import dev_rows, row_set
from capt.finetune.glue.files import Examples
from capt.finetune.load import FineTuned, load_fine_tuned
from capt.finetune.text_training import Classifier, TextObjective, build_classifier
from capt.pretrain.base.distributed import device
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.parallel import ProgressCallback

__all__ = ["as_text", "command"]

GlueClassifier = FineTuned[GlueJob, Classifier]
"""A checkpoint of a ``glue`` job, loaded."""


def load_classifier(path: Path) -> GlueClassifier:
    """Load a checkpoint of a ``glue`` job, or the best one of a run, after verifying every file.

    Raises:
        CheckpointError: nothing is there, it is damaged, or it is the checkpoint of another kind of job.
    """
    return load_fine_tuned(path, GlueJob, "glue", build_classifier)


def predict(
    checkpoint: Path | GlueClassifier, examples: Examples, *, batch: int = 32, progress: ProgressCallback | None = None
) -> Num[np.ndarray, " n"]:
    """Predict a class number (int64), or a score from 0 to 5 (float32), for each of ``examples``.

    Args:
        checkpoint: a checkpoint, a run (its best one), or a classifier that is loaded already.
        examples: rows of the checkpoint's task, or of one with the same classes (AX by a model of MNLI).
        batch: rows a forward pass.
        progress: called with the rows done and their number.

    Raises:
        CheckpointError: as `load_classifier`.
        ConfigError: single texts for a task of pairs, or the other way round.
    """
    trained = checkpoint if isinstance(checkpoint, FineTuned) else load_classifier(checkpoint)
    section, task = trained.job.data, trained.job.data.text_task
    if task.pair != (examples.second is not None):
        kinds = ("pairs of texts", "single texts")
        wanted, there = kinds if task.pair else kinds[::-1]
        raise ConfigError(f"{examples.source}: {task.folder} is a task of {wanted}, these are {there}")
    assert section.sequence_length is not None, "TextJob.with_encoder fills it in"
    model, objective = trained.model.to(device()), TextObjective(task)
    types = model.reads_types
    rows = row_set(examples, section, trained.tokenizer, section.sequence_length, types=types)
    return objective.predictions(results_of_all_rows(model, rows, objective, batch, device(), progress))


def _measured(trained: GlueClassifier, data: Path | None) -> EvaluationSets:
    """The task's dev set, or both of MNLI's; ``data`` is a folder of GLUE's files, where the run's has moved."""
    section, types = trained.job.data, trained.model.reads_types
    if data is not None:
        section = section.model_copy(update={"path": data, "source": "files"})
    assert section.sequence_length is not None, "TextJob.with_encoder fills it in"
    sets = dev_rows(section, trained.tokenizer, section.sequence_length, types=types)
    return EvaluationSets(section.task, sets, TextObjective(section.text_task))


command = evaluate_command(load_classifier, _measured)
"""The function that ``capt evaluate`` calls."""
