"""Which trials have been begun in a study's folder: each wrote down what it is made of when it began."""

from __future__ import annotations

import json
from pathlib import Path

from launcher import runfolder
from launcher.sweep.trials import Point, StudyPlan

_POINT = "point.json"


def note(run_dir: Path, point: Point) -> None:
    """Write down what a trial is made of, when it begins."""
    values = {"study": point.study, "params": dict(point.params), "seed": point.seed}
    runfolder.write_private(run_dir / _POINT, json.dumps(values) + "\n")


def begun(study: StudyPlan) -> list[Point]:
    """The trials of a study that were begun, in the order in which they were, and that are of its present base job."""
    files = sorted(study.folder.glob(f"*/{_POINT}"), key=lambda path: path.stat().st_mtime_ns)
    points = [Point(**json.loads(path.read_text(encoding="utf-8"))) for path in files]
    return [point for path, point in zip(files, points, strict=True) if study.run_dir(point) == path.parent]
