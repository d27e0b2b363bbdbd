"""Read a run folder for a report: metrics, configuration, status, the newest checkpoint, and evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import Field

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.files import read_json
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.config import flatten, load_mapping
from capt.pretrain.config.load import load_job
from capt.pretrain.engine.evaluations import EVALUATION, Figures, Section, read_sections
from capt.pretrain.engine.judgement import Judgement, judge, trained_on
from capt.pretrain.engine.metrics_file import METRICS, MetricsRow, read_metrics
from capt.pretrain.engine.run_folder import read_status
from capt.pretrain.engine.step_folders import MANIFEST, checkpoints_of, is_step
from capt.pretrain.registry import task_module
from capt.pretrain.report.document import ReportSection

_NO_CURVE = frozenset({"validation_samples"})
_MOST_CURVES = 500
_LARGEST = 1e100
_AS_WRITTEN = "the numbers of capt evaluate, as it wrote them into the run folder"


class NothingLoggedError(DataError):
    """A run or a sweep has logged nothing yet; a report of several leaves it out."""


class _Shapes(Record):
    shapes: dict[str, Annotated[list[Count], Field(max_length=16)]]


class Bracket(Record):
    """A predicted number, and the least and the most that it may be."""

    predicted: float = Field(strict=False)
    least: float = Field(strict=False)
    most: float = Field(strict=False)


class PlanFacts(Record):
    """The part of a ``plan.json``, the prediction of ``capt plan``, that a report shows."""

    devices: str = Field(max_length=100)
    ranks: int = Field(ge=1)
    seconds_per_step: Bracket
    mfu: Bracket | None = None


class CheckpointFacts(Record):
    """The part of a checkpoint's ``manifest.json`` that a report shows: parameters, and where it was written."""

    world_size: int = Field(ge=1)
    modules: dict[str, _Shapes]
    provenance: dict[str, str] = Field({}, max_length=1000)

    @property
    def parameters(self) -> int:
        """The number of parameters of all modules; tied ones count once."""
        return sum(math.prod(shape) for module in self.modules.values() for shape in module.shapes.values())

    @property
    def hardware(self) -> str:
        """The ranks and their GPU, or the processor of the first."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"{ranks}, {self.provenance['hardware'][:200]}" if "hardware" in self.provenance else ranks


@dataclass(frozen=True)
class RunRecord:
    """The metrics, configuration and status of a run.

    ``config`` has flat keys (``"optimizer.lr"``); ``notes`` are warnings about damaged or missing files.
    ``checkpoint`` are the facts of the newest one, ``evaluations`` what ``capt evaluate`` has measured, by checkpoint.
    """

    folder: Path
    config: dict[str, Any]
    status: dict[str, Any]
    training: list[MetricsRow]
    validation: list[MetricsRow]
    notes: list[str]
    checkpoint: CheckpointFacts | None = None
    evaluations: dict[str, list[Section]] = field(default_factory=dict)
    plan: PlanFacts | None = None

    @property
    def last_step(self) -> int:
        """The last step of all rows."""
        return max(row.step for row in (*self.training, *self.validation))

    @property
    def tokens(self) -> int:
        """The positions that the run had seen at its last row; 0 where it has no tokens."""
        return max(row.tokens for row in (*self.training, *self.validation))

    @property
    def seconds(self) -> float | None:
        """The time in training steps, without validation and checkpoints; None where no rate was logged."""
        steps, rates = self.series("seconds_per_step", validation=False)
        spans = zip([0, *steps], steps, rates, strict=False)
        return sum((step - before) * rate for before, step, rate in spans if math.isfinite(rate)) if steps else None

    @property
    def judgement(self) -> Judgement:
        """The judgement of the run by its records: it learns or it does not."""
        best = self.config.get("checkpoint.best")
        best = best if isinstance(best, str) else None
        training, validation = (trained_on(rows, self.config, best) for rows in (self.training, self.validation))
        return judge(training, validation, best)

    def series(self, key: str, *, validation: bool) -> tuple[list[int], list[float]]:
        """The steps and values of one curve; both empty where the run never logged it."""
        rows = [row for row in (self.validation if validation else self.training) if key in row.figures]
        return [row.step for row in rows], [row.figures[key] for row in rows]

    def of_whole_steps(self, key: str) -> list[float]:
        """The values of a training curve after its first row that are of steps of ``batch.global`` alone.

        Raises:
            ConfigError: the configuration has ``batch.ramp``, and is none of a job that is known here.
        """
        ramp = 0
        if self.config.get("batch.ramp"):
            ramp = load_job(str(self.folder / "config.yaml"), resolved=True).batch_sizes.stages[-1].step
        steps, values = self.series(key, validation=False)
        return [value for before, value in zip(steps, values[1:], strict=False) if before >= ramp]

    def keys(self, *, validation: bool) -> list[str]:
        """The names of all curves, in the order in which the run first logged them."""
        rows = self.validation if validation else self.training
        return list(dict.fromkeys(key for row in rows for key in row.figures if key not in _NO_CURVE))


def read_run(folder: Path) -> RunRecord:
    """Read one run folder.

    Raises:
        DataError: the folder, metrics.jsonl or config.yaml is missing or no regular file.
        NothingLoggedError: metrics.jsonl is missing in the folder of a run, or no line in it is a row.
        ConfigError: config.yaml is malformed.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run folder")
    # A run that has just begun has no metrics yet: an error of its own, which a report of several runs passes over.
    for name in ("config.yaml", METRICS):
        if not (folder / name).exists():
            kind = NothingLoggedError if name == METRICS else DataError
            raise kind(f"{folder / name}: no such file; a run folder holds metrics.jsonl and config.yaml")
    metrics = read_metrics(folder / METRICS)
    rows, notes = [*metrics.training, *metrics.validation], metrics.notes
    if not rows:
        raise NothingLoggedError(
            f"{folder / METRICS}: no line is a JSON object with a step: nothing was logged yet, or the file is damaged"
        )
    names = {name for row in rows for name in row.figures}
    if len(names) > _MOST_CURVES:
        raise DataError(f"{folder / METRICS}: {len(names):,} different figures; a report shows at most {_MOST_CURVES}")
    status = _read_status(folder, notes)
    not_finite = {key for row in rows for key, value in row.figures.items() if not math.isfinite(value)}
    if not_finite:
        notes.append(f"values that are not finite were logged for {', '.join(sorted(not_finite))}")
    config = flatten(load_mapping(folder / "config.yaml", resolved=True))
    checkpoint, evaluations = _newest_checkpoint(folder, notes), dict(_evaluations(folder, notes))
    return RunRecord(
        folder, config, status, metrics.training, metrics.validation, notes, checkpoint, evaluations,
        _plan(folder, notes),
    )  # fmt: skip


def _plan(folder: Path, notes: list[str]) -> PlanFacts | None:
    try:
        return read_record(PlanFacts, folder / "plan.json", error=DataError)
    except FileNotFoundError:
        return None
    except (DataError, OSError):
        notes.append("plan.json is not what capt plan writes and was left out")
        return None


def _newest_checkpoint(folder: Path, notes: list[str]) -> CheckpointFacts | None:
    complete = checkpoints_of(folder)
    if not complete:
        return None
    newest = complete[-1] / MANIFEST
    try:
        return read_record(CheckpointFacts, newest, error=DataError)
    except (DataError, OSError):
        notes.append(f"{newest.relative_to(folder)} is damaged and was left out")
        return None


def _evaluations(folder: Path, notes: list[str]) -> Iterator[tuple[str, list[Section]]]:
    """Yield checkpoints, or splits of the data, and what was measured; a result without sections is one of numbers."""
    for path in sorted(folder.glob(EVALUATION.format(checkpoint="*"))):
        name = path.stem.removeprefix("evaluation-")
        try:
            content = read_json(path)
            if isinstance(content, dict) and "sections" not in content:
                found = flatten(content).items()
                figures: Figures = {key: float(value) for key, value in found if _is_figure(value)}
                if len(figures) > _MOST_CURVES:
                    raise DataError(f"{path}: {len(figures):,} figures; a report shows at most {_MOST_CURVES}")
                yield name, [Section(name="figure", protocol=_AS_WRITTEN, metrics=figures)] if figures else []
            elif is_step(name):
                yield name, read_sections(path)
        except (DataError, OSError, RecursionError):
            notes.append(f"{path.name} is not what capt evaluate writes and was left out")


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _read_status(folder: Path, notes: list[str]) -> dict[str, Any]:
    try:
        status = read_status(folder)
    except ConfigError:
        notes.append("status.json is damaged and was left out")
        return {}
    if status is None:
        notes.append("no status.json: the run does not say how it ended")
        return {}
    return status.model_dump(exclude_unset=True)


# What tasks add to a report: functions of the module ``report`` in a task's package, where it has one.
#
# ``run_sections(runs)`` gets the runs of a report (:class:`~capt.pretrain.report.runs.RunRecord`),
# ``sections(sweeps)`` its sweeps (:class:`~capt.pretrain.report.sweeps.SweepRecord`). Both return a list of
# :class:`~capt.pretrain.report.document.ReportSection`.


def report_module(task: str) -> ModuleType | None:
    """Return the module ``report`` of a task's package; None where it has none, or the task is not installed."""
    try:
        return task_module(task, "report")
    except ConfigError:
        return None


def task_sections(
    types: Iterable[str], function: str, folders: Sequence[Any], module_of: Callable[[str], ModuleType | None]
) -> list[ReportSection]:
    """Return ``function(folders)`` of the module of each task of ``types`` that has one, by the names of the tasks."""
    found = [getattr(module_of(task), function, None) for task in sorted(set(types))]
    return [section for add in found if add is not None for section in add(folders)]
