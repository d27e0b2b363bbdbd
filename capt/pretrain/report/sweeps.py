"""Read the folder of a sweep, ``sweep.yaml`` and ``trials.jsonl``, and group its finished trials by study.

The trials of a study that differ only in the seed are one configuration. Which is the best:
`capt.pretrain.report.compare`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field, FiniteFloat, ValidationError, field_validator

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import open_regular
from capt.pretrain.base.records import Count, Record
from capt.pretrain.config import flatten, load_mapping
from capt.pretrain.engine.metrics_file import bounded_lines
from capt.pretrain.report.compare import from_the_median, ranked
from capt.pretrain.report.runs import NothingLoggedError

# ``trials.jsonl`` of a sweep: one typed record for each finished trial, for its writer and its readers. No torch.


TRIALS = "trials.jsonl"

_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Number = Annotated[FiniteFloat, Field(strict=False, ge=-1e100, le=1e100)]
_KEYS = 1000


State = Literal["done", "failed", "pruned"]
"""The end of a trial; the scheduler ended a pruned one early."""


class TrialRecord(Record):
    """A finished trial. ``score`` is its best validation value, ``metrics`` the validation row that holds it."""

    study: _Name
    params: Annotated[dict[_Name, Any], Field(max_length=_KEYS)]
    seed: Count
    state: State
    metric: _Name = "score"
    mode: Literal["max", "min"] = "max"
    score: _Number | None = None
    best_step: Count | None = None
    metrics: dict[_Name, _Number | None] = Field(default_factory=dict, max_length=_KEYS)
    run: Annotated[str, Field(min_length=1, max_length=1000)]
    """The run's folder, below the sweep's."""
    node: str = ""
    seconds: Annotated[_Number, Field(ge=0)] = 0.0
    attempts: Count = 1
    error: str = ""

    def to_json(self) -> str:
        """Return the record as a line of the file."""
        return json.dumps(self.model_dump(mode="json"))

    @field_validator("study", "metric", "run")
    @classmethod
    def _is_printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("holds characters that cannot be shown")
        return value

    @field_validator("run")
    @classmethod
    def _lies_below(cls, run: str) -> str:
        parts = PurePosixPath(run).parts
        if PurePosixPath(run).is_absolute() or ".." in parts or not parts:
            raise ValueError("leads out of the sweep's folder")
        return run


def read_trials(path: Path) -> tuple[dict[str, TrialRecord], list[str]]:
    """Read the trials by their run folders (of several lines about one, the last), and notes about damaged lines.

    Raises:
        DataError: it is not a regular file, or over a GiB. ``OSError`` passes.
    """
    records: dict[str, TrialRecord] = {}
    damaged: list[str] = []
    with open_regular(path) as file:
        for number, raw in enumerate(bounded_lines(file, path), start=1):
            if not raw.strip():
                continue
            try:
                line = TrialRecord.model_validate(json.loads(raw))
            except ValidationError as error:
                key = error.errors(include_url=False, include_input=False, include_context=False)[0]["loc"]
                # The key alone, shortened: what the file holds there may be of any length.
                damaged.append(f"{number} ({ascii(key[0])[:42] if key else 'no object'})")
            except (ValueError, RecursionError):
                damaged.append(str(number))
            else:
                # Popped before it is set again: the last line of a run decides its place too.
                records.pop(line.run, None)
                records[line.run] = line
    more = f" and {len(damaged) - 10} more" if len(damaged) > 10 else ""
    notes = [f"damaged lines of {TRIALS} were left out: {', '.join(damaged[:10])}{more}"] if damaged else []
    return records, notes


SWEEP = "sweep.yaml"


class Trial(TrialRecord):
    """A finished trial of the sweep in ``folder``. ``metrics`` are those that have a value."""

    folder: Path
    metrics: dict[str, float]  # type: ignore[assignment]

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder / self.run

    @property
    def done(self) -> bool:
        """True where the trial ran to its end and has a score."""
        return self.state == "done" and self.score is not None

    @property
    def flag(self) -> str | None:
        """The reason why the score is no result: a failure, a constant prediction, or no better than one."""
        if not self.done:
            return self.state
        if self.metrics.get("degenerate"):
            return "constant prediction"
        baseline = self.metrics.get("baseline")
        if baseline is not None and self.score is not None and self.score <= baseline:
            return "no better than a constant prediction"
        return None


@dataclass(frozen=True)
class Configuration:
    """The trials of one point of the search space, by seed."""

    params: dict[str, Any]
    trials: list[Trial]

    @cached_property
    def scores(self) -> list[float]:
        """The scores of the trials that ran to their end."""
        return [trial.score for trial in self.trials if trial.done and trial.score is not None]

    @property
    def pruned(self) -> int:
        """The number of trials that the scheduler stopped early."""
        return sum(trial.state == "pruned" for trial in self.trials)

    @property
    def median(self) -> float:
        """The median over the seeds; NaN without a score."""
        return statistics.median(self.scores) if self.scores else math.nan

    @property
    def mean(self) -> float:
        """The mean over the seeds; NaN without a score."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def std(self) -> float | None:
        """The sample standard deviation over the seeds (n - 1); None for fewer than two."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    def metric_median(self, name: str) -> float | None:
        """The median over the seeds of another metric at the best validation; None where a trial lacks it."""
        values = [trial.metrics.get(name) for trial in self.trials if trial.done]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known and len(known) == len(values) else None

    @property
    def label(self) -> str:
        """The parameters as a person reads them: ``batch.global=16, optimizer.lr=1e-05``."""
        return ", ".join(f"{key}={value}" for key, value in sorted(self.params.items())) or "as in the base"


@dataclass(frozen=True)
class Study:
    """All trials on one base configuration."""

    name: str
    metric: str
    mode: str
    seeds: list[int]
    configurations: list[Configuration]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of one of its runs, flat; empty where none has begun."""
        files = (trial.path / "config.yaml" for trial in self.trials)
        found = next((file for file in files if file.is_file()), None)
        return {} if found is None else flatten(load_mapping(found, resolved=True))

    @property
    def trials(self) -> list[Trial]:
        """All trials, configuration by configuration."""
        return [trial for configuration in self.configurations for trial in configuration.trials]

    @cached_property
    def ranked(self) -> list[Configuration]:
        """The configurations that have a score, the best median first; those that lack seeds come after those that
        have more, and of equal ones the one that `configurations` has first is before the others.
        """
        order = ranked({number: c.scores for number, c in enumerate(self.configurations)}, self.sign)
        return [self.configurations[number] for number in order]

    @property
    def best(self) -> Configuration | None:
        """The first of `ranked`."""
        return next(iter(self.ranked), None)

    @property
    def representatives(self) -> list[Trial]:
        """The finished trials: of the best configuration first, and of each the one that has the median first."""
        scored = [[(t.score, t) for t in c.trials if t.done and t.score is not None] for c in self.ranked]
        return [trial for pairs in scored for trial in from_the_median(pairs, self.sign)]

    @property
    def chosen(self) -> Trial | None:
        """The trial of the best configuration whose score is its median: its checkpoint is the study's."""
        return next(iter(self.representatives), None)

    @property
    def sign(self) -> int:
        """1 where higher is better, -1 where lower is."""
        return -1 if self.mode == "min" else 1


@dataclass(frozen=True)
class SweepRecord:
    """The trials of a sweep folder, by study; ``notes`` are warnings about damaged or missing files."""

    folder: Path
    studies: list[Study]
    notes: list[str]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    def study(self, name: str) -> Study | None:
        """Return the study of that name, where the sweep has one."""
        return next((study for study in self.studies if study.name == name), None)


def comparable(studies: Sequence[Study | None]) -> list[Configuration | None]:
    """Return the configurations whose learning curves are drawn together, one per study.

    It is the same configuration in all studies, the one with the best sum of medians, so that a step has the same
    number of examples everywhere; one that lacks seeds comes after those that have more. Where the studies have none in
    common it is each one's best.
    """
    present = [study for study in studies if study is not None]
    first = present[0]
    by_label = [{c.label: c for c in study.configurations if c.scores} for study in present]
    common = [label for label in by_label[0] if all(label in configurations for configurations in by_label)]
    if len(present) == 1 or not common:
        return [study.best if study else None for study in studies]

    def rank(label: str) -> tuple[int, float]:
        several = [each[label] for each in by_label]
        return sum(len(each.scores) for each in several), first.sign * sum(each.median for each in several)

    label = max(common, key=rank)
    chosen = iter(by_label)
    return [next(chosen)[label] if study else None for study in studies]


def is_sweep(folder: Path) -> bool:
    """Return whether ``folder`` is the folder of a sweep and not of a run."""
    return (folder / TRIALS).is_file() or (folder / SWEEP).is_file()


def read_sweep(folder: Path) -> SweepRecord:
    """Read a sweep folder; of several lines about a run the last counts, and torn lines are left out and noted.

    Raises:
        NothingLoggedError: trials.jsonl is missing or holds no trial.
        DataError: it is not a regular file.
    """
    path = folder / TRIALS
    if not path.exists():
        raise NothingLoggedError(f"{path}: no such file; a sweep folder holds {TRIALS} once its first trial has ended")
    lines, notes = read_trials(path)
    if not lines:
        raise NothingLoggedError(f"{path}: no line is a finished trial's" + (f" ({notes[0]})" if notes else ""))
    seeds = _seeds(folder)
    by_study: dict[str, list[TrialRecord]] = {}
    for line in lines.values():
        by_study.setdefault(line.study, []).append(line)
    studies = [study_of(name, of_study, folder, seeds) for name, of_study in sorted(by_study.items())]
    for study in studies:
        # A pruned trial was ended without a score on purpose: it lacks none.
        lacking = [c for c in study.configurations if len(c.scores) + c.pruned < len(study.seeds)]
        if lacking:
            total = len(study.configurations)
            notes.append(f"{study.name}: {len(lacking)} of {total} configurations lack the score of a seed")
        if study.best is not None and len(study.best.scores) < len(study.seeds):
            notes.append(
                f"{study.name}: the best configuration has {len(study.best.scores)} of {len(study.seeds)} seeds: "
                "its median is over those that are left"
            )
    return SweepRecord(folder, studies, notes)


def study_of(name: str, lines: Sequence[TrialRecord], folder: Path, seeds: list[int]) -> Study:
    """Group the finished trials of a study, of which there is one at least, by their settings.

    Reports, the last line of a sweep, the checkpoints that it keeps and submissions all ask this one for what is best.
    """
    trials = [_trial(line, folder) for line in lines]
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(json.dumps(trial.params, sort_keys=True, default=str), []).append(trial)
    configurations = [
        Configuration(group[0].params, sorted(group, key=lambda trial: trial.seed)) for group in groups.values()
    ]
    configurations.sort(key=_order)
    first = lines[0]
    return Study(name, first.metric, first.mode, seeds or sorted({trial.seed for trial in trials}), configurations)


def _trial(line: TrialRecord, folder: Path) -> Trial:
    metrics = {name: value for name, value in line.metrics.items() if value is not None}
    return Trial.model_construct(**{**dict(line), "metrics": metrics, "folder": folder})


def _seeds(folder: Path) -> list[int]:
    try:
        sweep = load_mapping(folder / SWEEP, resolved=True) if (folder / SWEEP).is_file() else {}
    except ConfigError:
        return []
    section, scheduler = sweep.get("sweep"), sweep.get("scheduler")
    seeds = section.get("seeds") if isinstance(section, Mapping) else None
    found = [seed for seed in seeds if type(seed) is int] if isinstance(seeds, list) else []
    # A population has no seeds of a setting: each member changes its own.
    return found[:1] if isinstance(scheduler, Mapping) and scheduler.get("type") == "pbt" else found


def _order(configuration: Configuration) -> list[tuple[int, Any]]:
    values = [configuration.params[key] for key in sorted(configuration.params)]
    return [(0, value) if is_number(value) else (1, str(value)) for value in values]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value of a configuration is a number; a truth value is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_number(value: float | None) -> str:
    """Format ``value`` with at most four decimals; empty for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1000 else f"{value:.4g}"
