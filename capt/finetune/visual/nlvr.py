"""NLVR2: accuracy and consistency as the official script computes them, and result files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from capt.finetune.predictions import write_checked
from capt.finetune.visual.dumps import LARGEST, Checked, Figures, checked, coverage_problems, cut
from capt.pretrain.base.errors import DataError, counted, shown
from capt.pretrain.base.files import read_text
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document
from capt.pretrain.vision_language.data.read import examples_of

_WORDS = ("False", "True")


def nlvr2_group(identifier: str) -> str:
    """Return what statements of a sentence share: ``dev-850-0-1`` without the number of its pictures (the third)."""
    fields = identifier.split("-")
    return "-".join([*fields[:2], "", *fields[3:]])


def nlvr_scores(predictions: Mapping[str, bool], examples: Iterable[Example]) -> dict[str, float]:
    """Return ``accuracy`` over the statements and ``consistency``, the share of groups that are right in all of theirs.

    Statements are grouped by `nlvr2_group`. Statements without a label do not count.

    Raises:
        DataError: no statement has a label, or one has no prediction.
    """
    labelled = {str(example.id): example.truth for example in examples if example.truth is not None}
    if not labelled:
        raise DataError("no statement has a label; there is nothing to score")
    if missing := [key for key in labelled if key not in predictions]:
        raise DataError(f"{counted(len(missing), 'statement')} without a prediction, such as {missing[0]!r}")
    right = {key: predictions[key] == truth for key, truth in labelled.items()}
    groups: dict[str, bool] = {}
    for key, is_right in right.items():
        group = nlvr2_group(key)
        groups[group] = groups.get(group, True) and is_right
    return {
        "accuracy": sum(right.values()) / len(right),
        "consistency": sum(groups.values()) / len(groups),
    }


def write_nlvr(predictions: Mapping[str, bool], out: Path, expected: Iterable[int | str]) -> Path:
    """Write ``identifier,True`` lines, checked by `check_nlvr` before.

    Raises:
        DataError: the predictions are not exactly those of the statements ``expected``; nothing is written.
    """
    wanted = list(expected)

    def write(file: IO[bytes]) -> None:
        for key, value in predictions.items():
            file.write(f"{key},{_WORDS[value]}\n".encode())

    return write_checked(out, write, lambda path: check_nlvr(path, wanted))


def check_nlvr(path: Path, expected: Iterable[int | str], *, only: bool = True) -> list[str]:
    """List what the official script would not score in a result file, one line for each problem.

    It must be a CSV without a header, with ``identifier,True`` or ``identifier,False`` (in upper or lower case) for
    each statement of the set, and with ``only`` for no other one. The official script passes over others.

    Raises:
        DataError: the file is missing, too large or not UTF-8 text.
    """
    rows, problems = _rows(path)
    return problems + coverage_problems([key for key, _ in rows], expected, only=only)


def read_nlvr(path: Path) -> dict[str, bool]:
    """Read the predictions of a result file. Raises ``DataError`` for one that is malformed."""
    rows, problems = _rows(path)
    if problems:
        raise DataError(f"{path}: {'; '.join(problems)}")
    return dict(rows)


def _rows(path: Path) -> tuple[list[tuple[str, bool]], list[str]]:
    rows, problems = [], []
    words = [word.lower() for word in _WORDS]
    for number, line in enumerate(read_text(path, limit=LARGEST).split("\n"), start=1):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 2 or cells[1].lower() not in words:
            problems.append(f"line {number}: {shown(line)} is not identifier,{'|'.join(reversed(_WORDS))}")
        else:
            rows.append((cells[0], cells[1].lower() == words[1]))
    return rows, cut(problems)


def check(path: Path, documents: list[Document], task: str) -> Checked:
    """Check and score a result file of NLVR2."""
    examples = examples_of(documents, what="--data")
    ids = [str(example.id) for example in examples]

    def score(predictions: Mapping[str, bool]) -> Figures:
        return Figures(nlvr_scores(predictions, examples))

    labelled = any(example.truth is not None for example in examples)
    problems = check_nlvr(path, ids, only=False)
    return checked(task, ids, problems, lambda: read_nlvr(path), score if labelled else None)


def write(
    predictions: Mapping[Any, Any], examples: Sequence[Example], files: Sequence[Path], out: Path, task: str
) -> Path:
    """Write the truths of the statements ``examples``."""
    return write_nlvr(predictions, out, [str(row.id) for row in examples])


def scores(predictions: Mapping[str, bool], examples: Iterable[Example], task: str) -> dict[str, float]:
    """Return the scores of a result file (`nlvr_scores`)."""
    return nlvr_scores(predictions, examples)
