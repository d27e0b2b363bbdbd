"""``trials.jsonl``, the record of finished trials, and which of their checkpoints are kept."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from capt.launcher.sweep.trials import StudyPlan, SweepPlan, TrialSpec, setting_key
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.files import open_for_append, open_regular, require_own_folder, write_text
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.config.load import flatten, load_mapping
from capt.pretrain.engine.metrics_file import LINE, METRICS, MetricsRow, bounded_lines, parse_row, read_metrics
from capt.pretrain.engine.run_folder import read_status
from capt.pretrain.engine.step_folders import MANIFEST
from capt.pretrain.report.sweeps import TRIALS, State, Study, TrialRecord, read_trials, study_of

_STATE, _SPEC = "trial.json", "point.json"
JOB = "job.yaml"
_DRAWN = "drawn.jsonl"
OVER = ("done", "pruned")
"""States of trials that are over for good. One that failed may be tried again."""


class TrialState(Record):
    """``trial.json``: how long a trial has run, how often it was started, on which node, and what went wrong."""

    attempts: Count = 0
    seconds: Annotated[float, Field(ge=0)] = 0.0
    node: str = ""
    error: str = ""

    @classmethod
    def read(cls, run_dir: Path) -> TrialState:
        """Read the state of a run, empty where there is no file. Raises ``DataError`` for a damaged file."""
        try:
            return read_record(cls, run_dir / _STATE, "; remove it", error=DataError)
        except FileNotFoundError:
            return cls()

    def updated(self, **changes: Any) -> TrialState:
        """Return a copy with other values."""
        return self.model_copy(update=changes)

    def write(self, run_dir: Path) -> None:
        """Replace the state of a run."""
        write_text(run_dir / _STATE, self.model_dump_json(by_alias=True) + "\n", private=True)


class _Setting(Record):
    study: str
    params: dict[str, Any]


class _Spec(_Setting):
    seed: Count


def write_spec(run_dir: Path, spec: TrialSpec) -> None:
    """Write the setting and seed of a trial that starts, as ``point.json``."""
    values = {"study": spec.study, "params": dict(spec.params), "seed": spec.seed}
    write_text(run_dir / _SPEC, json.dumps(values) + "\n", private=True)


def started_trials(study: StudyPlan) -> list[TrialSpec]:
    """Return the trials of a study that were started with its present base job, in the order of their start.

    Raises:
        DataError: a ``point.json`` is damaged.
    """
    files = sorted(study.folder.glob(f"*/{_SPEC}"), key=lambda path: path.stat().st_mtime_ns)
    records = [read_record(_Spec, path, "; remove it", error=DataError) for path in files]
    specs = [TrialSpec(record.study, record.params, record.seed) for record in records]
    # A folder is named by the whole job, so that trials of another base job lie in others.
    return [spec for path, spec in zip(files, specs, strict=True) if study.run_dir(spec) == path.parent]


class DrawnSettings:
    """The settings of a study that a searcher has drawn, in their order.

    A line is on the disk before the setting is tried, so that no kill lets a sweep draw it again. Of an older sweep
    without the file they are those of the trials that were started.

    Raises:
        DataError: the file is not a regular one, or a ``point.json`` is damaged.
    """

    def __init__(self, folder: Path, study: StudyPlan) -> None:
        self._path, self._study = folder / _DRAWN, study.name
        found: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            with open_regular(self._path) as file:
                for line in bounded_lines(file, self._path):
                    with suppress(ValueError):  # torn as the driver died, so that it was not tried either
                        record = _Setting.model_validate_json(line)
                        if record.study == study.name:
                            found.setdefault(setting_key(record.params), record.params)
        for spec in started_trials(study):
            found.setdefault(setting_key(spec.params), dict(spec.params))
        self.settings: list[dict[str, Any]] = list(found.values())

    def add(self, params: Mapping[str, Any]) -> None:
        """Record a setting."""
        _append(self._path, json.dumps({"study": self._study, "params": dict(params)}))
        self.settings.append(dict(params))


# Reads the validation rows of a run while it writes them.


class ValidationRows:
    """Each validation row of a ``metrics.jsonl`` once, in order, also when a resumed run rewrites the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self._queue: deque[MetricsRow] = deque()
        self._last = -1
        self.count = 0
        """Rows handed out or skipped so far."""

    def next(self) -> MetricsRow | None:
        """Return the next row; None while there is none."""
        if not self.waiting():
            return None
        self.count += 1
        return self._queue.popleft()

    def waiting(self) -> bool:
        """Return whether ``next`` would return a row."""
        self._read()
        return bool(self._queue)

    def skip(self, step: int) -> None:
        """Count the rows up to a step without handing them out."""
        self._read()
        while self._queue and self._queue[0].step <= step:
            self._queue.popleft()
            self.count += 1

    def _read(self) -> None:
        try:
            with open_regular(self._path) as f:
                facts = os.fstat(f.fileno())
                # Another file, or a shorter one: it is read from its beginning.
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    self._inode, self._offset = facts.st_ino, 0
                f.seek(self._offset)
                while line := f.readline(LINE):
                    if not line.endswith(b"\n") and len(line) < LINE:
                        return  # still being written
                    self._offset += len(line)
                    row = parse_row(line)
                    # A resumed run logs again the validations behind its checkpoint.
                    if row is not None and row.is_validation and row.step > self._last:
                        self._last = row.step
                        self._queue.append(row)
        except FileNotFoundError:
            return


def run_state(run_dir: Path) -> str:
    """Return the state in a run's ``status.json``; empty when the file is missing or damaged."""
    try:
        status = read_status(run_dir)
    except ConfigError:
        return ""
    return status.state if status else ""


def validations(run_dir: Path) -> list[MetricsRow]:
    """Read the validation rows of a run; an empty list when it has logged nothing."""
    path = run_dir / METRICS
    return read_metrics(path).validation if path.exists() else []


def best_row(rows: Iterable[MetricsRow], study: StudyPlan) -> MetricsRow | None:
    """Return the first of the rows with the best value of the study's metric."""
    best: MetricsRow | None = None
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

    @property
    def over(self) -> dict[str, State]:
        """The states of the trials that are over for good, by their run folders."""
        return {run: record.state for run, record in self.records.items() if record.state in OVER}

    def state(self, spec: TrialSpec) -> State | None:
        """Return the recorded state of a trial."""
        record = self.records.get(self._plan.run_name(spec))
        return record.state if record else None

    def is_over(self, spec: TrialSpec) -> bool:
        """Return whether a trial is over; one whose driver died before it could record it is recorded now."""
        if self.state(spec) not in OVER and run_state(self._plan.run_dir(spec)) == "done":
            self.add(spec, "done")
        return self.state(spec) in OVER

    def params(self, spec: TrialSpec) -> dict[str, Any]:
        """Return the parameters that a trial was last started with, which a population changes."""
        path = self._plan.run_dir(spec) / JOB
        if not (self._plan.population and path.exists()):
            return dict(spec.params)
        job = flatten(load_mapping(path, resolved=True))
        if lacking := spec.params.keys() - job.keys():
            raise DataError(f"{path}: lacks {min(lacking)}; remove the run folder, or write its value into the file")
        return {key: job[key] for key in spec.params}

    def add(self, spec: TrialSpec, state: State, error: str = "") -> TrialRecord:
        """Record how a trial ended, and remove the checkpoints that are no longer kept."""
        study, run = self._plan.studies[spec.study], self._plan.run_dir(spec)
        kept = TrialState.read(run)
        best = best_row(validations(run), study)
        record = TrialRecord(
            study=spec.study,
            params=self.params(spec),
            seed=spec.seed,
            state=state,
            metric=study.metric,
            mode=study.mode,
            score=_finite(best.figures[study.metric]) if best else None,
            best_step=best.step if best else None,
            metrics={name: _finite(value) for name, value in best.figures.items()} if best else {},
            run=self._plan.run_name(spec),
            node=kept.node,
            seconds=round(kept.seconds, 2),
            attempts=kept.attempts,
            error=error or (kept.error if state == "failed" else ""),
        )
        self.records[record.run] = record
        _append(self._path, record.to_json())
        if not self._plan.population:  # members copy from each other until all have ended
            self.drop_checkpoints(spec.study)
        return record

    def study(self, name: str) -> Study | None:
        """Return the study with its finished trials, as a report has it; None before the first has finished."""
        records = [record for record in self.records.values() if record.study == name]
        return study_of(name, records, self._plan.folder, list(self._plan.seeds)) if records else None

    def drop_checkpoints(self, study: str, *, ended: bool = False) -> None:
        """Remove the checkpoints of a study's finished trials that are not kept.

        Kept are the first of `Study.representatives`. Which of a setting's seeds has the median shows once all are
        over, so that until then, or until the study has ``ended``, all of its checkpoints stay.
        """
        found = self.study(study)
        if found is None:
            return
        kept = {trial.run for trial in found.representatives[: self._keep]}
        if self._keep and not ended and not self._plan.population:
            for setting in found.configurations:
                if len(setting.trials) < len(self._plan.seeds) and setting.pruned < len(setting.trials):
                    kept |= {trial.run for trial in setting.trials}
        top = self._plan.folder.resolve()
        for trial in found.trials:
            if trial.state in ("done", "pruned") and trial.run not in kept:
                run = trial.path
                if not run.resolve().is_relative_to(top):
                    raise DataError(f"{run}: leads out of the sweep's folder by a link; remove it")
                remove_checkpoints(run)


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
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _append(path: Path, line: str) -> None:
    with open_for_append(path) as f:
        # After a line that was torn, the next one begins on its own.
        if f.tell() and not _ends_with_newline(path):
            f.write("\n")
        f.write(line + "\n")
        f.flush()
        os.fsync(f.fileno())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as f:
        f.seek(-1, os.SEEK_END)
        return f.read() == b"\n"
