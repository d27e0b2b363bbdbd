"""The ``glue`` task: a classifier on a pretrained encoder (Liu et al. 2019, section 5.1)."""

from __future__ import annotations

from pathlib import Path

from capt.finetune.batches import TextRows
from capt.finetune.glue.config import GlueJob
from capt.finetune.glue.data import dev_rows, train_rows
from capt.finetune.task import Identity
from capt.finetune.text_training import TextFineTuning
from capt.pretrain.config.schema import Job
from capt.tokenizer.encode import TextTokenizer


class GlueFineTuning(TextFineTuning):
    """Cross entropy, or squared error for STS-B; metrics on the whole dev set, for MNLI on both (``_mismatched``)."""

    job: GlueJob

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, GlueJob)
        super().__init__(job, run_dir, {"task": Identity(job.data.task, "data.task")})

    def read_rows(
        self, job: GlueJob, tokenizer: TextTokenizer, length: int, types: bool
    ) -> tuple[TextRows, dict[str, TextRows]]:
        """The training split, and every dev split by the suffix of its metrics."""
        train = train_rows(job.data, tokenizer, length, types=types)
        return train, dev_rows(job.data, tokenizer, length, types=types)


TASK = GlueFineTuning
