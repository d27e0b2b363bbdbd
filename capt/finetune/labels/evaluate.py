"""``capt evaluate`` of a checkpoint of a ``labels`` job: the metrics of its held-out rows, or of another file."""

from __future__ import annotations

from pathlib import Path

from capt.finetune.evaluation import EvaluationSets, as_text, evaluate_command
from capt.finetune.glue.data import row_set
from capt.finetune.labels.config import LabelsJob
from capt.finetune.labels.data import examples, read_splits
from capt.finetune.labels.rows import read_rows
from capt.finetune.load import FineTuned, load_fine_tuned
from capt.finetune.text_training import Classifier, TextObjective, build_classifier

__all__ = ["as_text", "command"]


def _measured(trained: FineTuned[LabelsJob, Classifier], data: Path | None) -> EvaluationSets:
    """The rows of a file with the columns of the training data, or those that the run held out, read again."""
    section = trained.job.data
    rows = read_splits(section).validation if data is None else examples(read_rows(data, section), section)
    assert section.sequence_length is not None, "TextJob.with_encoder fills it in"
    types = trained.model.reads_types
    sets = {"": row_set(rows, section, trained.tokenizer, section.sequence_length, types=types)}
    measured = data or section.validation
    title = f"the labels of {measured.name}" if measured else f"the labels held out of {section.train.name}"
    return EvaluationSets(title, sets, TextObjective(section.text_task))


command = evaluate_command(lambda path: load_fine_tuned(path, LabelsJob, "labels", build_classifier), _measured)
