"""What a trial leaves: its notes in its run folder, its line in ``trials.jsonl``, and whether its checkpoints stay."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from launcher import runfolder
from launcher.sweep.trials import Plan, Point, StudyPlan
from pretrain.base.errors import ConfigError, DataError
from pretrain.base.files import open_for_append, read_json, require_own_folder
from pretrain.base.records import Count, Record, parse
from pretrain.engine.metrics_file import METRICS, Row, read_metrics
from pretrain.engine.run_folder import read_status
from pretrain.report.trials_file import TRIALS, read_trials

State = Literal["done", "failed", "pruned"]
_NOTES = "trial.json"


class Change(Record):
    """Population based training: from a step on other values, or those of another member."""

    model_config = ConfigDict(populate_by_name=True)

    step: Count
    params: dict[str, Any]
    source: str = Field(alias="from")


class TrialState(Record):
    """What the process that runs a trial writes beside its run: how long, how often, where, what went wrong."""

    attempts: Count = 0
    seconds: Annotated[float, Field(ge=0)] = 0.0
    node: str = ""
    error: str = ""
    history: Annotated[tuple[Change, ...], Field(strict=False)] = ()
    """Population based training: ``{"step", "params", "from"}`` of each change."""

    @classmethod
    def read(cls, run_dir: Path) -> TrialState:
        """The notes of a run, empty where there are none. Raises ``DataError`` for damaged ones."""
        path = run_dir / _NOTES
        if not path.exists():
            return cls()
        return parse(cls, read_json(path), path, "; remove it", error=DataError)

    def with_(self, **changes: Any) -> TrialState:
        """These notes with changes."""
        return self.model_copy(update=changes)

    def write(self, run_dir: Path) -> None:
        """Replace the run's notes."""
        runfolder.write_private(run_dir / _NOTES, self.model_dump_json(by_alias=True) + "\n")


def status(run_dir: Path) -> str:
    """The state in a run's ``status.json``; empty where there is none, or a damaged one."""
    try:
        found = read_status(run_dir)
    except ConfigError:
        return ""
    return found.state if found else ""


def validations(run_dir: Path) -> list[Row]:
    """The validation rows of a run; none of one that logged nothing."""
    path = run_dir / METRICS
    return read_metrics(path).validation if path.exists() else []


def best_row(rows: Iterable[Row], study: StudyPlan) -> Row | None:
    """The first of the rows with the best value of the study's metric."""
    best: Row | None = None
    for row in rows:
        value = row.figures.get(study.metric)
        if value is not None and (best is None or study.better(value, best.figures[study.metric])):
            best = row
    return best


class TrialLog:
    """``trials.jsonl``: a line a finished trial, the last line of a run counts."""

    def __init__(self, plan: Plan, keep: int) -> None:
        self._plan, self._keep = plan, keep
        self._path = plan.folder / TRIALS
        self.lines: dict[str, dict[str, Any]] = {}
        if self._path.exists():  # a line torn when the driver died is left out: its trial is found by its folder
            self.lines = {run: line.model_dump() for run, line in read_trials(self._path)[0].items()}

    def finished(self, point: Point) -> bool:
        """Whether a trial is over for good: done or pruned. One that failed may be tried again."""
        return self.state(point) in ("done", "pruned")

    def state(self, point: Point) -> str | None:
        """The recorded state of a trial."""
        state: str | None = self._line(point).get("state")
        return state

    def score(self, point: Point) -> float | None:
        """The score of a recorded trial."""
        score: float | None = self._line(point).get("score")
        return score

    def is_done(self, point: Point) -> bool:
        """Whether a trial is over, recorded or, when the driver died before it could, only in its run folder."""
        if self.finished(point):
            return True
        if status(self._plan.run_dir(point)) != "done":
            return False
        self.add(point, "done")
        return True

    def add(self, point: Point, state: State, error: str = "") -> dict[str, Any]:
        """Record how a trial ended, and drop the checkpoints that are no longer among the study's best."""
        study, run = self._plan.studies[point.study], self._plan.run_dir(point)
        notes = TrialState.read(run)
        rows = validations(run)
        best = best_row(rows, study)
        line: dict[str, Any] = {
            "study": point.study,
            "params": dict(notes.history[-1].params if notes.history else point.params),
            "seed": point.seed,
            "state": state,
            "metric": study.metric,
            "mode": study.mode,
            "score": _finite(best.figures[study.metric]) if best else None,
            "best_step": best.step if best else None,
            "metrics": {name: _finite(value) for name, value in best.figures.items()} if best else {},
            "run": str(run.relative_to(self._plan.folder)),
            "node": notes.node,
            "seconds": round(notes.seconds, 2),
            "attempts": notes.attempts,
            "error": error or (notes.error if state == "failed" else ""),
        }
        if notes.history:
            line["history"] = [change.model_dump(by_alias=True) for change in notes.history]
        self.lines[str(line["run"])] = line
        with open_for_append(self._path) as f:
            if f.tell() and not _ends_with_newline(self._path):
                f.write("\n")
            f.write(json.dumps(line) + "\n")
            f.flush()
            os.fsync(f.fileno())
        if not self._plan.population:  # members copy from each other until all have ended
            self.drop_checkpoints(point.study)
        return line

    def best(self, study: str) -> list[dict[str, Any]]:
        """The recorded trials of a study that have a score, best first."""
        scored = [line for line in self.lines.values() if line["study"] == study and line["score"] is not None]
        sign = -1 if self._plan.studies[study].mode == "max" else 1
        return sorted(scored, key=lambda line: sign * line["score"])

    def drop_checkpoints(self, study: str) -> None:
        """Remove the checkpoints of the study's finished trials, except those of its best."""
        kept = {line["run"] for line in self.best(study)[: self._keep]}
        top = self._plan.folder.resolve()
        for line in self.lines.values():
            if line["study"] == study and line["state"] in ("done", "pruned") and line["run"] not in kept:
                run = self._plan.folder / line["run"]
                if not run.resolve().is_relative_to(top):
                    raise DataError(f"{run}: leads out of the sweep's folder by a link; remove it")
                remove_checkpoints(run)

    def _line(self, point: Point) -> Mapping[str, Any]:
        return self.lines.get(str(self._plan.run_dir(point).relative_to(self._plan.folder)), {})


def remove_checkpoints(run_dir: Path, names: Sequence[str] = ("*",)) -> None:
    """Remove checkpoints of a run by name, marks of completeness first. Nothing is removed through a link."""
    folder = run_dir / "checkpoints"
    for path in (run_dir, folder):
        require_own_folder(path)
    for pattern in names:
        for path in folder.glob(pattern):
            if path.is_symlink():
                path.unlink()
            elif path.is_dir():
                (path / "manifest.json").unlink(missing_ok=True)
                shutil.rmtree(path)


def with_seconds(notes: TrialState, since: float, now: float) -> TrialState:
    """The notes, with the time since the ranks were started added."""
    return notes.with_(seconds=notes.seconds + now - since)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as f:
        f.seek(-1, os.SEEK_END)
        return f.read() == b"\n"
