"""Configuration of the toy fine-tuning task."""

from capt.finetune.config import FineTuningJob


class ToyJob(FineTuningJob):
    """A job with a number of rows."""

    rows: int = 37


JOB = ToyJob
