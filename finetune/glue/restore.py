"""A fine-tuned classifier back from a checkpoint, which needs nothing beside itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune.classifier import Classifier
from finetune.glue.config import GlueJob
from finetune.glue.tasks import GlueTask, glue_task
from pretrain.base.errors import CheckpointError
from pretrain.engine.checkpoint import find_best, open_checkpoint, restored
from pretrain.models.encoder import Encoder
from pretrain.models.foreign.build import build_encoder
from pretrain.models.foreign.families import FAMILIES
from tokenizer.encode import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class Restored:
    """A checkpoint's classifier in evaluation mode, its tokenizer, its task and its job."""

    checkpoint: Path
    model: Classifier
    tokenizer: TextTokenizer
    task: GlueTask
    job: GlueJob


def classifier_on(encoder: Encoder, job: GlueJob) -> Classifier:
    """``encoder`` under a freshly initialised head for the job's task."""
    section, task = job.model, glue_task(job.data.task)
    assert section.encoder is not None, "GlueJob.completed fills it in"
    head = section.dropout if section.classifier_dropout is None else section.classifier_dropout
    return Classifier(encoder, max(1, len(task.labels)), head, FAMILIES[section.encoder["model_type"]].activation)


def load_classifier(path: Path) -> Restored:
    """Load a checkpoint of a ``glue`` job, or the best one of a run, after verifying every file.

    Raises:
        CheckpointError: nothing there, damaged, or the checkpoint of another kind of job.
    """
    checkpoint = find_best(path)
    job = open_checkpoint(checkpoint, GlueJob, "glue")
    section = job.model
    if section.encoder is None:
        raise CheckpointError(f"{checkpoint / 'config.yaml'}: model.encoder is not set; every glue checkpoint has it")
    dropouts = {"dropout": section.dropout, "attention_dropout": section.attention_dropout}
    sizes = section.encoder
    model = restored(
        checkpoint, "model", lambda: classifier_on(build_encoder(sizes, **dropouts, source=str(checkpoint)), job)
    )
    tokenizer = load_tokenizer(checkpoint / "tokenizer")
    return Restored(checkpoint, model.eval(), tokenizer, glue_task(job.data.task), job)
