"""The leaderboard's submission: a flat zip of eleven files ``index<TAB>prediction``, written and checked."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from finetune.glue.tasks import GLUE, GlueTask
from finetune.predictions import write_checked
from pretrain.base.errors import DataError
from pretrain.data.sts_files import MAX_SCORE

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
            f"is in the zip as {ascii(nested)[1:-1][:80]}; all files must be at its top (zip -j)"
            if nested
            else "is missing"
        )
        problems.append(f"{name} {place}")
    others = [name for name in names if Path(name).name not in wanted | {""}]
    problems += [f"{ascii(name)[1:-1][:80]} is not a file of a submission" for name in others[:_MAX_SHOWN]]
    problems += [f"{len(others) - _MAX_SHOWN:,} more are none"] if len(others) > _MAX_SHOWN else []
    problems += [f"{name} is in the zip twice" for name in sorted(wanted) if names.count(name) > 1]
    return problems


def _check_file(archive: zipfile.ZipFile, output: SubmissionFile) -> list[str]:
    entry = archive.getinfo(f"{output.name}.tsv")
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
