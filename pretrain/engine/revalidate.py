"""Validates a checkpoint as its job did in training, in one process."""

from __future__ import annotations

import tempfile
from pathlib import Path

from capt.pretrain.config.schema import Job
from capt.pretrain.engine.checkpoint import load_module_weights, read_job, read_manifest, verify
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.task import CheckedValidation, Progress, to_float
from capt.pretrain.registry import task_class


def validate_checkpoint(checkpoint: Path) -> dict[str, float]:
    """Return what the job's own validation reports of the weights of ``checkpoint``; empty where it has none.

    The data are those of the job, prepared again where they are not in its cache.

    Raises:
        UserError: they are not there any more, or are no more what they were; or the checkpoint is damaged.
    """
    verify(checkpoint)
    progress = read_manifest(checkpoint).progress
    with tempfile.TemporaryDirectory() as scratch:
        job = _alone(read_job(checkpoint), checkpoint, Path(scratch))
        task = task_class(job.task.type)(job, job.run.dir)
        if isinstance(task, CheckedValidation) and task.validation_fault():
            return {}
        modules = task.build_modules()
        for name, module in modules.items():
            load_module_weights(checkpoint, name, module)
        engines = build_engines(modules, task.job, task.optimizers())
        for engine in engines.values():
            engine.eval()
        report = task.validate(engines, Progress(progress.step, progress.samples, progress.tokens))
    return {name: to_float(value) for name, value in report.items()}


def _alone(job: Job, checkpoint: Path, scratch: Path) -> Job:
    """The job on one rank, with the tokenizer of the checkpoint, writing into ``scratch``."""
    update: dict[str, object] = {
        "run": job.run.model_copy(update={"dir": scratch, "branch_from": None}),
        "engine": type(job.engine)(zero_stage=0),
        "batch": job.batch.model_copy(update={"micro": None, "ramp": []}),
    }
    tokenizer = getattr(job, "tokenizer", None)
    if tokenizer is not None and (checkpoint / "tokenizer").is_dir():
        update["tokenizer"] = tokenizer.model_copy(update={"path": checkpoint / "tokenizer"})
    return job.model_copy(update=update)
