"""``capt evaluate`` of a checkpoint of a ``labels`` job: the metrics of its held-out rows, or of another file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capt.finetune.evaluation import as_text, evaluate_checkpoint
from capt.finetune.glue.data import row_set
from capt.finetune.labels.config import LabelsJob
from capt.finetune.labels.data import examples, read_rows, read_splits
from capt.finetune.load import load_fine_tuned
from capt.finetune.text_training import TextObjective, build_classifier
from capt.pretrain.base.parallel import ProgressCallback

__all__ = ["as_text", "command"]


def command(
    checkpoint: Path,
    *,
    data: Path | None = None,
    out: Path | None = None,
    batch: int = 32,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """The metrics of a checkpoint (`evaluate_checkpoint`).

    Args:
        checkpoint: a checkpoint, or a run (its best one).
        data: a file with the columns of the training data; None = the rows that the run held out, which are read again.
        out: JSON file to write the result to as well.
        batch: rows a forward pass.
        progress: called with the rows done and their number.

    Raises:
        CheckpointError: there is no such checkpoint of a ``labels`` job.
        DataError: the file cannot be read.
    """
    trained = load_fine_tuned(checkpoint, LabelsJob, "labels", build_classifier)
    section = trained.job.data
    rows = read_splits(section).validation if data is None else examples(read_rows(data, section), section)
    assert section.sequence_length is not None, "TextJob.with_encoder fills it in"
    types = trained.model.reads_types
    sets = {"": row_set(rows, section, trained.tokenizer, section.sequence_length, types=types)}
    objective = TextObjective(section.text_task)
    measured = data or section.validation
    title = f"the labels of {measured.name}" if measured else f"the labels held out of {section.train.name}"
    return evaluate_checkpoint(trained, sets, objective, task=title, out=out, batch=batch, progress=progress)
