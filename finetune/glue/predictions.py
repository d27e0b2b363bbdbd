"""From a sweep over GLUE to a submission's predictions: the best checkpoint of each task, and its test set."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from finetune.glue.files import Examples, find_split
from finetune.glue.submission import SUBMISSION_FILES, SubmissionFile, majority_wnli
from finetune.glue.tasks import GLUE
from pretrain.base.errors import CheckpointError, DataError
from pretrain.base.progress import ProgressCallback
from pretrain.engine.checkpoint import read_job
from pretrain.engine.checkpoint.manifest import MANIFEST
from pretrain.report.sweeps import Study, SweepRecord, read_sweep

logger = logging.getLogger(__name__)


def predict_tests(
    sweep: Path, data: Path | None = None, progress: ProgressCallback | None = None
) -> dict[str, np.ndarray]:
    """Predict every test set of a submission with the best checkpoint of its task in ``sweep``.

    Without a study of WNLI its most frequent class is predicted, with a warning. All studies, checkpoints and test
    files are looked for before the first prediction.

    Args:
        sweep: the folder of a sweep.
        data: a folder with GLUE's files, when the test sets are not where the trials found their training data.
        progress: called with the rows done and their number, for each set.

    Raises:
        DataError: the sweep lacks a task, or a test set cannot be read or has not the official number of rows.
        CheckpointError: a study has no trial with its best checkpoint.
    """
    from finetune.glue.predict import predict  # torch and transformers: after the checks that need neither

    checkpoints = best_checkpoints(read_sweep(sweep))
    models = dict.fromkeys(file.model for file in SUBMISSION_FILES.values())
    lacking = [GLUE[model].folder for model in models if model not in {*checkpoints, "wnli"}]
    if lacking:
        raise DataError(f"{sweep}: no study of {', '.join(lacking)}; a submission needs every task")
    examples = {
        name: _test_set(file, checkpoints[file.model], data)
        for name, file in SUBMISSION_FILES.items()
        if file.model in checkpoints
    }
    predictions: dict[str, np.ndarray] = {}
    for name, file in SUBMISSION_FILES.items():
        if name in examples:
            logger.info("%s: %s", name, checkpoints[file.model])
            predictions[name] = predict(checkpoints[file.model], examples[name], progress=progress)
        else:
            logger.warning("%s: the sweep has no study of it: its most frequent class is predicted for every row", name)
            predictions[name] = majority_wnli()
    return predictions


def best_checkpoints(sweep: SweepRecord) -> dict[str, Path]:
    """The checkpoint of each GLUE task in ``sweep``: of the setting with the best median, the seed that has it.

    Where several studies are of a task the one with the better median counts, as in the report.

    Raises:
        CheckpointError: a task has no finished trial, or the one that is to predict kept no checkpoint.
    """
    tasks: dict[str, list[Study]] = {}
    for study in sweep.studies:
        if study.config.get("task.type") == "glue":
            tasks.setdefault(str(study.config.get("data.task")), []).append(study)
    return {task: _checkpoint(sweep, studies) for task, studies in tasks.items()}


def _checkpoint(sweep: SweepRecord, studies: Sequence[Study]) -> Path:
    judged = [(study.sign * study.best.median, trial) for study in studies if study.best and (trial := study.chosen)]
    if not judged:
        raise CheckpointError(f"{sweep.folder}: no trial of {', '.join(study.name for study in studies)} is finished")
    _, trial = max(judged, key=lambda pair: pair[0])
    best = trial.run / "checkpoints" / "best"
    if not (best / MANIFEST).is_file():
        raise CheckpointError(
            f"{best}: no checkpoint, and this trial represents {trial.study}: its score is the median of the best "
            "setting; run the sweep with sweep.keep_checkpoints of 1 or more"
        )
    return best


def _test_set(output: SubmissionFile, checkpoint: Path, data: Path | None) -> Examples:
    from finetune.glue.config import GlueJob
    from finetune.glue.data import read_examples

    job = read_job(checkpoint)
    if not isinstance(job, GlueJob):
        raise CheckpointError(f"{checkpoint}: a checkpoint of task.type {job.task.type}, not of glue")
    section = job.data if data is None else job.data.model_copy(update={"source": "files", "path": data})
    if section.source == "files" and section.path is not None:
        find_split(section.path, output.task, output.split)
    examples = read_examples(section, output.task, output.split)
    if len(examples) != output.rows or examples.index != list(range(output.rows)):
        raise DataError(
            f"{examples.source}: {len(examples):,} rows; a submission needs the official {output.rows:,}, in order"
        )
    return examples


def prediction_summary(predictions: Mapping[str, np.ndarray]) -> str:
    """How often each class was predicted, or the mean score, in one line for each file: a constant prediction shows."""
    lines = []
    for name, values in predictions.items():
        task = SUBMISSION_FILES[name].task
        if task.regression:
            text = f"mean {values.mean():.3f}, from {values.min():.3f} to {values.max():.3f}"
        else:
            counts = np.bincount(values, minlength=len(task.labels))
            text = ", ".join(f"{label} {count:,}" for label, count in zip(task.labels, counts, strict=True))
        lines.append(f"{name:<8}{len(values):>8,}  {text}")
    return "\n".join(lines)
