"""A ``glue`` job without its texts, for ``capt plan``: the rows of its training set are known."""

from __future__ import annotations

from capt.finetune.glue.config import GlueJob
from capt.finetune.plan import in_steps
from capt.finetune.plan import rehearse as rehearse


def completed(job: GlueJob) -> GlueJob:
    """Return the job with its epochs as steps."""
    return in_steps(job, job.data.text_task.rows["train"])
