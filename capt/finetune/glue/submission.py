"""The leaderboard's submission: a flat zip of eleven files ``index<TAB>prediction``, written and checked."""

from __future__ import annotations

import logging
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from capt.finetune.glue.files import Examples
from capt.finetune.glue.tasks import GLUE, GlueTask
from capt.finetune.predictions import write_checked
from capt.pretrain.base.errors import CheckpointError, DataError
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


HEADER = "index\tprediction"
_MAX_BYTES = 1 << 26  # an order of magnitude over QQP, the largest
_MAX_SHOWN = 3
_WHEN = (1980, 1, 1, 0, 0, 0)  # so that the same predictions give the same bytes
_SCORE = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True)
class SubmissionFile:
    """One file of a submission, ``NAME.tsv``: the model of task ``model`` predicts the ``split`` of ``task``."""

    name: str
    task: GlueTask
    split: str
    model: str

    @property
    def rows(self) -> int:
        """How many predictions the leaderboard expects."""
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
    """Write the zip ``out`` with all :data:`SUBMISSION_FILES`, after checking it as :func:`check_submission` does.

    ``predictions`` are classes (int) by the names of :data:`SUBMISSION_FILES`; those of STS-B are scores, which are
    clipped to 0 to 5 and written with three decimals.

    Raises:
        DataError: a file is missing or has not the official number of predictions, or a prediction is not valid.
    """
    problems = [f"{name}: no predictions" for name in SUBMISSION_FILES if name not in predictions]
    problems += [f"{name}: not a file of a submission" for name in predictions if name not in SUBMISSION_FILES]
    if problems:
        raise DataError(f"the submission is not complete: {'; '.join(problems)}")

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, output in SUBMISSION_FILES.items():
                lines = [HEADER, *(f"{i}\t{value}" for i, value in enumerate(_as_text(output, predictions[name])))]
                entry = zipfile.ZipInfo(f"{name}.tsv", _WHEN)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, "\n".join(lines) + "\n")

    return write_checked(out, write, check_submission)


def check_submission(path: Path) -> list[str]:
    """What the leaderboard would refuse in ``path``, one line for each problem; empty for a valid submission.

    Checked are the eleven names, at the top of the zip, the header, the number of lines, the running index, and that
    every prediction is one of the task's labels (STS-B: a number from 0 to 5).

    Raises:
        DataError: there is no such file, or it is not a whole zip.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            return _check_names(archive) + [
                problem
                for output in SUBMISSION_FILES.values()
                if f"{output.name}.tsv" in archive.namelist()
                for problem in _check_file(archive, output)
            ]
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError) as error:
        raise DataError(f"{path}: not a whole zip file: {error}") from None


def _check_names(archive: zipfile.ZipFile) -> list[str]:
    names = [entry.filename for entry in archive.infolist()]
    wanted = {f"{name}.tsv" for name in SUBMISSION_FILES}
    problems = []
    for name in sorted(wanted - set(names)):
        nested = next((other for other in names if Path(other).name == name), None)
        place = (
            f"is in the zip as {ascii(nested)[1:-1][:80]}; all files must be at its top: zip -j NEW.zip FOLDER/*.tsv"
            if nested
            else "is missing"
        )
        problems.append(f"{name} {place}")
    others = [name for name in names if Path(name).name not in wanted and not name.endswith("/")]  # "/": a folder
    problems += [f"{ascii(name)[1:-1][:80]} is not a file of a submission" for name in others[:_MAX_SHOWN]]
    problems += [f"{len(others) - _MAX_SHOWN:,} more are none"] if len(others) > _MAX_SHOWN else []
    problems += [f"{name} is in the zip twice" for name in sorted(wanted) if names.count(name) > 1]
    return problems


def _check_file(archive: zipfile.ZipFile, output: SubmissionFile) -> list[str]:
    entry = archive.getinfo(f"{output.name}.tsv")
    # By the size that the entry declares, before it is unpacked.
    if entry.file_size > _MAX_BYTES:
        return [f"{entry.filename}: {entry.file_size:,} bytes; {output.rows:,} predictions need far fewer"]
    if entry.flag_bits & 1:
        return [f"{entry.filename}: encrypted"]
    try:
        lines = archive.read(entry).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        return [f"{entry.filename}: not UTF-8 text (byte {error.start})"]
    problems = []
    if lines[0].rstrip("\r") != HEADER:
        problems.append(f"{entry.filename}, line 1: the header is {lines[0][:40]!r}; it must be {HEADER!r}")
    count = len(lines) - 1
    if count != output.rows:
        problems.append(f"{entry.filename}: {count:,} predictions; the official test set has {output.rows:,}")
    wrong = [
        f"{entry.filename}, line {number + 2}: {problem}"
        for number, line in enumerate(lines[1:])
        if (problem := _check_line(line.rstrip("\r"), number, output.task))
    ]
    if len(wrong) > _MAX_SHOWN:
        wrong[_MAX_SHOWN:] = [f"{entry.filename}: {len(wrong) - _MAX_SHOWN:,} more lines are wrong"]
    return problems + wrong


def _check_line(line: str, number: int, task: GlueTask) -> str | None:
    cells = line.split("\t")
    if len(cells) != 2:
        return f"{len(cells)} columns; there must be two, index and prediction"
    if cells[0] != str(number):
        return f"index {cells[0][:40]!r}; it must be {number}, rows count from 0"
    if task.regression:
        valid = _SCORE.fullmatch(cells[1]) is not None and 0 <= float(cells[1]) <= MAX_SCORE
        return None if valid else f"prediction {cells[1][:40]!r} is not a number from 0 to 5"
    if cells[1] not in task.labels:
        return f"prediction {cells[1][:40]!r}; {task.folder} has {', '.join(task.labels)}"
    return None


def _as_text(output: SubmissionFile, values: np.ndarray) -> list[str]:
    if output.task.regression:
        if not np.isfinite(values).all():
            raise DataError(f"{output.name}: {int((~np.isfinite(values)).sum())} predictions are not finite numbers")
        return [f"{value:.3f}" for value in np.clip(values, 0.0, MAX_SCORE)]
    labels = output.task.labels
    known = np.issubdtype(values.dtype, np.integer) and bool(np.isin(values, np.arange(len(labels))).all())
    if not known:
        raise DataError(f"{output.name}: predictions must be classes from 0 to {len(labels) - 1}")
    return [labels[value] for value in values]
