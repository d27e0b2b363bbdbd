"""Name runs by what sets them apart, group them by configuration, and sum up their validation numbers."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.report.runs import RunRecord

SEED = "run.seed"
_NOT_COMPARED = (
    SEED, "run.dir", "run.log_every", "run.tensorboard", "run.threads", "run.profile_step", "schedule.stop_after",
    "checkpoint.", "data.cache", "data.workers", "data.verify", "loader.", "engine.timeout_minutes",
)  # fmt: skip
"""Keys (with a dot at the end: sections) that leave a run's figures as they are: a seed that was stopped, resumed, or
run on another machine is one more of its configuration."""
_LOWER = ("loss", "alignment", "uniformity", "drift", "perplexity")
_HIGHER = ("accuracy", "retrieval", "top1", "gap", "spearman", "pearson", "f1", "matthews")


@dataclass(frozen=True)
class Summary:
    """One validation metric of the runs of a group. ``values`` are the runs'; ``std`` is over them (n - 1)."""

    values: list[float]
    steps: list[int]

    @property
    def mean(self) -> float:
        """Mean over the runs."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation; None for a single run."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Group:
    """Runs of one configuration; they differ in the seed at most."""

    label: str
    runs: list[RunRecord]

    @property
    def seeds(self) -> list[str]:
        """The runs' seeds."""
        return [str(run.config.get(SEED, "?")) for run in self.runs]

    def final(self, metric: str) -> Summary | None:
        """The last value of each run that has it."""
        return self._summary(metric, lambda values: len(values) - 1)

    def best(self, metric: str) -> Summary | None:
        """The best value of each run; None where it is not known which way is better."""
        way = direction(metric)
        if way == 0:
            return None
        return self._summary(metric, lambda values: max(range(len(values)), key=lambda i: way * values[i]))

    def _summary(self, metric: str, choose: Any) -> Summary | None:
        values: list[float] = []
        steps: list[int] = []
        for run in self.runs:
            finite = [(s, v) for s, v in zip(*run.series(metric, validation=True), strict=True) if math.isfinite(v)]
            if finite:
                step, value = finite[choose([v for _, v in finite])]
                steps.append(step)
                values.append(value)
        return Summary(values, steps) if values else None


@dataclass(frozen=True)
class Comparison:
    """All runs of a report. ``differing`` are the keys (without the seed) in which their configurations differ."""

    groups: list[Group]
    differing: list[str]

    @property
    def runs(self) -> list[RunRecord]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    def keys(self, *, validation: bool) -> list[str]:
        """Curves that at least one run logged."""
        return list(dict.fromkeys(key for run in self.runs for key in run.keys(validation=validation)))


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Group runs by their configuration, but the seed and what leaves the figures as they are, in the given order."""
    keys = sorted(key for key in {key for run in runs for key in run.config} if not _is_not_compared(key))
    differing = [key for key in keys if len({_text(run, key) for run in runs}) > 1]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        members.setdefault(tuple(_text(run, key) for key in differing), []).append(run)
    groups = []
    for number, (values, group) in enumerate(members.items()):
        if differing:
            label = ", ".join(f"{key}={value}" for key, value in zip(differing, values, strict=True))
            label = f"{_letters(number)}: {label}"
        else:
            label = runs[0].folder.resolve().name
        groups.append(Group(label, group))
    return Comparison(groups, differing)


def direction(metric: str) -> int:
    """1 where higher is better, -1 where lower is, 0 where the name does not say."""
    parts = metric.lower().replace("_", "/").split("/")
    if any(word in parts for word in _LOWER):
        return -1
    return 1 if any(word in parts for word in _HIGHER) else 0


def _is_not_compared(key: str) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in _NOT_COMPARED)


def _text(run: RunRecord, key: str) -> str:
    value = run.config.get(key, "unset")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _letters(number: int) -> str:
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)
