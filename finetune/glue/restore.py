"""A fine-tuned classifier back from a checkpoint, which needs nothing beside itself."""

from __future__ import annotations

from pathlib import Path

from capt.finetune.classifier import Classifier
from capt.finetune.glue.config import GlueJob
from capt.finetune.restore import FineTuned, load_fine_tuned
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import build_encoder
from capt.pretrain.models.foreign.families import FAMILIES

GlueClassifier = FineTuned[GlueJob, Classifier]
"""A checkpoint of a ``glue`` job, loaded."""


def classifier_on(encoder: Encoder, job: GlueJob) -> Classifier:
    """``encoder`` under a freshly initialised head for the job's task."""
    section, task = job.model, job.data.glue_task
    assert section.encoder is not None, "GlueJob.with_encoder fills it in"
    head = section.dropout if section.classifier_dropout is None else section.classifier_dropout
    return Classifier(encoder, max(1, len(task.labels)), head, FAMILIES[section.encoder["model_type"]].activation)


def load_classifier(path: Path) -> GlueClassifier:
    """Load a checkpoint of a ``glue`` job, or the best one of a run, after verifying every file.

    Raises:
        CheckpointError: nothing is there, it is damaged, or it is the checkpoint of another kind of job.
    """
    return load_fine_tuned(path, GlueJob, "glue", _build)


def _build(job: GlueJob, checkpoint: Path) -> Classifier:
    section = job.model
    if section.encoder is None:
        raise CheckpointError(f"{checkpoint / 'config.yaml'}: model.encoder is not set; every glue checkpoint has it")
    encoder = build_encoder(
        section.encoder,
        dropout=section.dropout,
        attention_dropout=section.attention_dropout,
        source=str(checkpoint),
    )
    return classifier_on(encoder, job)
