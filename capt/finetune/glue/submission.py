"""The leaderboard's submission: a flat zip of eleven files ``index<TAB>prediction``, checked before it is written."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from capt.finetune.glue.files import Examples
from capt.finetune.glue.tasks import GLUE, GlueTask
from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.base.files import replacing
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.data.sts_files import MAX_SCORE
from capt.pretrain.engine.checkpoint import read_job
from capt.pretrain.engine.step_folders import MANIFEST
from capt.pretrain.report.sweeps import Study, SweepRecord, read_sweep

# From a sweep over GLUE to a submission's predictions: the best checkpoint of each task, and its test set.


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
    from capt.finetune.glue.evaluate import predict

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
    """Choose the checkpoint of each GLUE task in ``sweep``: of the setting with the best median, the seed that has it.

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
    best = trial.path / "checkpoints" / "best"
    if not (best / MANIFEST).is_file():
        raise CheckpointError(
            f"{best}: no checkpoint, and this trial represents {trial.study}: its score is the median of the best "
            "setting; run the sweep with sweep.keep_checkpoints of 1 or more"
        )
    return best


def _test_set(output: SubmissionFile, checkpoint: Path, data: Path | None) -> Examples:
    from capt.finetune.glue.config import GlueJob
    from capt.finetune.glue.data import read_examples

    job = read_job(checkpoint)
    if not isinstance(job, GlueJob):
        raise CheckpointError(f"{checkpoint}: a checkpoint of task.type {job.task.type}, not of glue")
    section = job.data if data is None else job.data.model_copy(update={"source": "files", "path": data})
    examples = read_examples(section, output.task, output.split)
    if len(examples) != output.rows or examples.index != list(range(output.rows)):
        raise DataError(
            f"{examples.source}: {len(examples):,} rows; a submission needs the official {output.rows:,}, in order"
        )
    return examples


def prediction_summary(predictions: Mapping[str, np.ndarray]) -> str:
    """Count the predictions of each class, or average the scores, in one line for each file."""
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


_WHEN = (1980, 1, 1, 0, 0, 0)  # so that the same predictions give the same bytes


@dataclass(frozen=True)
class SubmissionFile:
    """A file of a submission, ``NAME.tsv``: the model of task ``model`` predicts the ``split`` of ``task``."""

    name: str
    task: GlueTask
    split: str
    model: str

    @property
    def rows(self) -> int:
        """The number of predictions that the leaderboard expects."""
        return self.task.rows[self.split]


def _file(task: str, name: str | None = None, split: str = "test", model: str | None = None) -> SubmissionFile:
    return SubmissionFile(name or GLUE[task].folder, GLUE[task], split, model or task)


SUBMISSION_FILES: dict[str, SubmissionFile] = {
    output.name: output
    for output in (
        *(_file(task) for task in ("cola", "sst2", "mrpc", "stsb", "qqp")),
        _file("mnli", "MNLI-m", "test_matched"),
        _file("mnli", "MNLI-mm", "test_mismatched"),
        *(_file(task) for task in ("qnli", "rte", "wnli")),
        _file("ax", model="mnli"),
    )
}
"""The eleven files by name."""


def majority_wnli() -> np.ndarray:
    """WNLI's most frequent class (0, not entailment) for every test row: what most entries send for it."""
    return np.zeros(GLUE["wnli"].rows["test"], dtype=np.int64)


def write_submission(predictions: Mapping[str, np.ndarray], out: Path) -> Path:
    """Write the zip ``out`` with all :data:`SUBMISSION_FILES`.

    ``predictions`` are classes (int) by the names of :data:`SUBMISSION_FILES`; those of STS-B are scores, which are
    clipped to 0 to 5 and written with three decimals.

    Raises:
        DataError: a file is missing or has not the official number of predictions, or a prediction is not valid;
            nothing is written.
    """
    problems = [f"{name}: no predictions" for name in SUBMISSION_FILES if name not in predictions]
    problems += [f"{name}: not a file of a submission" for name in predictions if name not in SUBMISSION_FILES]
    if problems:
        raise DataError(f"the submission is not complete: {'; '.join(problems)}")
    files = {
        name: "".join(f"{i}\t{value}\n" for i, value in enumerate(_as_text(output, predictions[name])))
        for name, output in SUBMISSION_FILES.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as (file, _), zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(f"{name}.tsv", _WHEN)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, f"index\tprediction\n{text}")
    return out


def _as_text(output: SubmissionFile, values: np.ndarray) -> list[str]:
    if len(values) != output.rows:
        raise DataError(f"{output.name}: {len(values):,} predictions; the official test set has {output.rows:,}")
    if output.task.regression:
        if not np.isfinite(values).all():
            raise DataError(f"{output.name}: {int((~np.isfinite(values)).sum())} predictions are not finite numbers")
        return [f"{value:.3f}" for value in np.clip(values, 0.0, MAX_SCORE)]
    labels = output.task.labels
    known = np.issubdtype(values.dtype, np.integer) and bool(np.isin(values, np.arange(len(labels))).all())
    if not known:
        raise DataError(f"{output.name}: predictions must be classes from 0 to {len(labels) - 1}")
    return [labels[value] for value in values]
