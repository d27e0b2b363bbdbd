"""A fine-tuned classifier back from a checkpoint, which needs nothing beside itself."""

from __future__ import annotations

from pathlib import Path

from capt.finetune.classifier import Classifier
from capt.finetune.glue.config import GlueJob
from capt.finetune.load import FineTuned, load_fine_tuned
from capt.finetune.text_training import build_classifier

GlueClassifier = FineTuned[GlueJob, Classifier]
"""A checkpoint of a ``glue`` job, loaded."""


def load_classifier(path: Path) -> GlueClassifier:
    """Load a checkpoint of a ``glue`` job, or the best one of a run, after verifying every file.

    Raises:
        CheckpointError: nothing is there, it is damaged, or it is the checkpoint of another kind of job.
    """
    return load_fine_tuned(path, GlueJob, "glue", build_classifier)
