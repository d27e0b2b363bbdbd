"""Which trials have been begun in a study's folder: each wrote down what it is made of when it began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher import runfolder
from launcher.sweep.trials import Point, StudyPlan
from pretrain.base.errors import DataError
from pretrain.base.files import read_json
from pretrain.base.records import Count, Record, parse

_POINT = "point.json"


class _Begun(Record):
    study: str
    params: dict[str, Any]
    seed: Count


def note(run_dir: Path, point: Point) -> None:
    """Write down what a trial is made of, when it begins."""
    values = {"study": point.study, "params": dict(point.params), "seed": point.seed}
    runfolder.write_private(run_dir / _POINT, json.dumps(values) + "\n")


def begun(study: StudyPlan) -> list[Point]:
    """The trials of a study that were begun, in the order in which they were, and that are of its present base job.

    Raises ``DataError`` for a damaged note.
    """
    files = sorted(study.folder.glob(f"*/{_POINT}"), key=lambda path: path.stat().st_mtime_ns)
    records = [parse(_Begun, read_json(path), path, "; remove it", error=DataError) for path in files]
    points = [Point(record.study, record.params, record.seed) for record in records]
    return [point for path, point in zip(files, points, strict=True) if study.run_dir(point) == path.parent]
