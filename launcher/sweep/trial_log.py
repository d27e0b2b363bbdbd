"""``trials.jsonl``, the record of finished trials, and which of their checkpoints are kept."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.sweep.trial_state import TrialState
from launcher.sweep.trials import StudyPlan, SweepPlan, TrialSpec
from pretrain.base.errors import ConfigError, DataError
from pretrain.base.files import open_for_append, require_own_folder
from pretrain.engine.metrics_file import METRICS, Row, read_metrics
from pretrain.engine.run_folder import read_status
from pretrain.report.ranking import from_the_median, ranked
from pretrain.report.trials_file import TRIALS, State, TrialRecord, read_trials


def run_state(run_dir: Path) -> str:
    """The state in a run's ``status.json``; empty when the file is missing or damaged."""
    try:
        status = read_status(run_dir)
    except ConfigError:
        return ""
    return status.state if status else ""


def validations(run_dir: Path) -> list[Row]:
    """The validation rows of a run; an empty list when it has logged nothing."""
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
    """``trials.jsonl``: one line for each finished trial; of several lines about a run, the last one counts."""

    def __init__(self, plan: SweepPlan, keep: int) -> None:
        self._plan, self._keep = plan, keep
        self._path = plan.folder / TRIALS
        self.records: dict[str, TrialRecord] = {}
        """The finished trials by their run folders, relative to the sweep's folder."""
        if self._path.exists():  # a line that was torn when the driver died is left out: the trial's folder tells
            self.records = read_trials(self._path)[0]

    def finished(self, spec: TrialSpec) -> bool:
        """Whether a trial is over for good: done or pruned. One that failed may be tried again."""
        return self.state(spec) in ("done", "pruned")

    def state(self, spec: TrialSpec) -> str | None:
        """The recorded state of a trial."""
        record = self._record(spec)
        return record.state if record else None

    def score(self, spec: TrialSpec) -> float | None:
        """The score of a recorded trial."""
        record = self._record(spec)
        return record.score if record else None

    def is_done(self, spec: TrialSpec) -> bool:
        """Whether a trial is over. One whose driver died before it could record it is recorded now."""
        if self.finished(spec):
            return True
        if run_state(self._plan.run_dir(spec)) != "done":
            return False
        self.add(spec, "done")
        return True

    def add(self, spec: TrialSpec, state: State, error: str = "") -> TrialRecord:
        """Record how a trial ended, and remove the checkpoints that are no longer kept."""
        study, run = self._plan.studies[spec.study], self._plan.run_dir(spec)
        kept = TrialState.read(run)
        best = best_row(validations(run), study)
        record = TrialRecord(
            study=spec.study,
            params=dict(kept.history[-1].params if kept.history else spec.params),
            seed=spec.seed,
            state=state,
            metric=study.metric,
            mode=study.mode,
            score=_finite(best.figures[study.metric]) if best else None,
            best_step=best.step if best else None,
            metrics={name: _finite(value) for name, value in best.figures.items()} if best else {},
            run=str(run.relative_to(self._plan.folder)),
            node=kept.node,
            seconds=round(kept.seconds, 2),
            attempts=kept.attempts,
            error=error or (kept.error if state == "failed" else ""),
            history=kept.history or None,
        )
        self.records[record.run] = record
        self._append(record.to_json())
        if not self._plan.population:  # members copy from each other until all have ended
            self.drop_checkpoints(spec.study)
        return record

    def _append(self, line: str) -> None:
        with open_for_append(self._path) as f:
            if f.tell() and not _ends_with_newline(self._path):
                f.write("\n")
            f.write(line + "\n")
            f.flush()
            os.fsync(f.fileno())

    def best(self, study: str) -> list[TrialRecord]:
        """The finished trials of a study: the best setting first, and of a setting the seed with the median score."""
        sign = 1 if self._plan.studies[study].mode == "max" else -1
        scores = {
            setting: [(r.score, r) for r in records if r.state == "done" and r.score is not None]
            for setting, records in self._settings(study).items()
        }
        order = ranked({setting: [score for score, _ in found] for setting, found in scores.items()}, sign)
        return [record for setting in order for record in from_the_median(scores[setting], sign)]

    def drop_checkpoints(self, study: str, *, ended: bool = False) -> None:
        """Remove the checkpoints of a study's finished trials that are not kept.

        Kept are those of the first trials of `best`. Which of a setting's seeds has the median shows once all are over,
        so that until then, or until the study has ``ended``, all of its checkpoints stay.
        """
        kept = {record.run for record in self.best(study)[: self._keep]}
        if self._keep and not ended and not self._plan.population:
            for records in self._settings(study).values():
                if len(records) < len(self._plan.seeds) and all(record.state != "pruned" for record in records):
                    kept |= {record.run for record in records}
        top = self._plan.folder.resolve()
        for record in self.records.values():
            if record.study == study and record.state in ("done", "pruned") and record.run not in kept:
                run = self._plan.folder / record.run
                if not run.resolve().is_relative_to(top):
                    raise DataError(f"{run}: leads out of the sweep's folder by a link; remove it")
                remove_checkpoints(run)

    def _settings(self, study: str) -> dict[str, list[TrialRecord]]:
        settings: dict[str, list[TrialRecord]] = {}
        for record in self.records.values():
            if record.study == study:
                settings.setdefault(json.dumps(record.params, sort_keys=True), []).append(record)
        return settings

    def _record(self, spec: TrialSpec) -> TrialRecord | None:
        return self.records.get(str(self._plan.run_dir(spec).relative_to(self._plan.folder)))


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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as f:
        f.seek(-1, os.SEEK_END)
        return f.read() == b"\n"
