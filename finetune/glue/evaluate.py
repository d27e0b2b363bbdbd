"""``capt evaluate`` of a fine-tuned checkpoint: the metrics of its dev set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.evaluation import as_text, evaluate_checkpoint
from finetune.glue.data import dev_rows
from finetune.glue.objective import GlueObjective
from finetune.glue.restore import GlueClassifier, load_classifier
from finetune.restore import FineTuned
from pretrain.base.progress import ProgressCallback

__all__ = ["as_text", "command", "evaluate"]


def command(
    checkpoint: Path,
    *,
    data: Path | None = None,
    out: Path | None = None,
    batch: int = 32,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """`evaluate` by the options of the command line; ``data`` is the folder with GLUE's files, if it has moved."""
    return evaluate(checkpoint, path=data, out=out, batch=batch, progress=progress)


def evaluate(
    checkpoint: Path | GlueClassifier,
    *,
    path: Path | None = None,
    out: Path | None = None,
    batch: int = 32,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """The task's metrics of a checkpoint on its dev set, or both of MNLI's (`evaluate_checkpoint`).

    Args:
        checkpoint: a checkpoint, a run (its best one), or a classifier that is loaded already.
        path: the folder with GLUE's files, when it is no longer where the run found it.
        out: JSON file to write the result to as well.
        batch: rows a forward pass.
        progress: called with the rows done and their number, for each set.

    Raises:
        CheckpointError: as `load_classifier`.
        DataError: the files cannot be read.
    """
    restored = checkpoint if isinstance(checkpoint, FineTuned) else load_classifier(checkpoint)
    data, types = restored.job.data, restored.model.reads_types
    if path is not None:
        data = data.model_copy(update={"path": path, "source": "files"})
    assert data.sequence_length is not None, "GlueJob.with_encoder fills it in"
    sets = dev_rows(data, restored.tokenizer, data.sequence_length, types=types)
    objective = GlueObjective(data.glue_task)
    return evaluate_checkpoint(restored, sets, objective, task=data.task, out=out, batch=batch, progress=progress)
