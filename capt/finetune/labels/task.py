"""The ``labels`` task: a classifier on a pretrained encoder, for labelled texts of one's own."""

from __future__ import annotations

from pathlib import Path

from capt.finetune.batches import TextRows
from capt.finetune.glue.data import row_set
from capt.finetune.labels.config import LabelsJob
from capt.finetune.labels.data import read_splits
from capt.finetune.order import chosen_rows
from capt.finetune.task import Identity
from capt.finetune.text_training import TextFineTuning
from capt.pretrain.config.schema import Job
from capt.tokenizer.encode import TextTokenizer


class LabelsFineTuning(TextFineTuning):
    """Cross entropy, squared error of scores, or cross entropy of each label; metrics of the held-out rows."""

    job: LabelsJob

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, LabelsJob)
        self._splits = read_splits(job.data)
        super().__init__(
            job.with_data(self._splits.data),
            run_dir,
            {"rows": Identity(self._splits.digest, "data.train and data.validation")},
            validation_name="validation",
        )

    def read_rows(
        self, job: LabelsJob, tokenizer: TextTokenizer, length: int, types: bool
    ) -> tuple[TextRows, dict[str, TextRows]]:
        """The training rows, or ``data.max_train`` of them, and the held-out ones."""
        train = self._splits.train
        train = train.rows(chosen_rows(len(train), job.data.max_train))
        return (
            row_set(train, job.data, tokenizer, length, types=types),
            {"": row_set(self._splits.validation, job.data, tokenizer, length, types=types)},
        )


TASK = LabelsFineTuning
