"""Predictions of a fine-tuned checkpoint, on one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Num

from finetune.evaluation import results_of_all_rows
from finetune.glue.data import row_set
from finetune.glue.files import Examples
from finetune.glue.objective import GlueObjective
from finetune.glue.restore import GlueClassifier, load_classifier
from finetune.restore import FineTuned
from pretrain.base.distributed import device
from pretrain.base.errors import ConfigError
from pretrain.base.progress import ProgressCallback


def predict(
    checkpoint: Path | GlueClassifier, examples: Examples, *, batch: int = 32, progress: ProgressCallback | None = None
) -> Num[np.ndarray, " n"]:
    """What a checkpoint predicts for each of ``examples``: class numbers (int64), or scores from 0 to 5 (float32).

    Args:
        checkpoint: a checkpoint, a run (its best one), or a classifier that is loaded already.
        examples: rows of the checkpoint's task, or of one with the same classes (AX by a model of MNLI).
        batch: rows a forward pass.
        progress: called with the rows done and their number.

    Raises:
        CheckpointError: as `load_classifier`.
        ConfigError: single texts for a task of pairs, or the other way round.
    """
    restored = checkpoint if isinstance(checkpoint, FineTuned) else load_classifier(checkpoint)
    section, task = restored.job.data, restored.job.data.glue_task
    if task.pair != (examples.second is not None):
        kind = "pairs of texts" if task.pair else "single texts"
        raise ConfigError(f"{examples.source}: {task.folder} is a task of {kind}")
    assert section.sequence_length is not None, "GlueJob.with_encoder fills it in"
    model, objective = restored.model.to(device()), GlueObjective(task)
    types = model.reads_types
    rows = row_set(examples, section, restored.tokenizer, section.sequence_length, types=types)
    return objective.predictions(results_of_all_rows(model, rows, objective, batch, device(), progress))
