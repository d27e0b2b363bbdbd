"""Group runs by configuration, label the groups by the keys in which they differ, and summarise their metrics."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from capt.pretrain.engine.judgement import direction
from capt.pretrain.report.runs import RunRecord

# Which setting of a study is the best, and which of its seeds represents it.
#
# One rule for reports, for checkpoints that are kept, and for submissions. A setting is judged by the median over its
# seeds, as in RoBERTa (Liu et al. 2019, 5.1): a single lucky seed must not choose it. A setting that lacks seeds comes
# after every one that has more, for a median over survivors is not a median. The trial that represents a setting is the
# one whose score is its median.


Key = TypeVar("Key")


def ranked(scores: Mapping[Key, Sequence[float]], sign: int) -> list[Key]:
    """The settings that have a score, best first.

    Args:
        scores: of each setting those of the seeds that ran to their end.
        sign: 1 where higher is better, -1 where lower is.
    """
    found = {key: values for key, values in scores.items() if values}
    return sorted(found, key=lambda key: (-len(found[key]), -sign * statistics.median(found[key])))


def from_the_median(scores: Iterable[tuple[float, Key]], sign: int) -> list[Key]:
    """Return what belongs to some scores, the median first and then those beside it, by their ranks.

    Of an even number of scores the worse of the two in the middle is the first.

    Args:
        scores: scores, each with what it belongs to.
        sign: 1 where higher is better, -1 where lower is.
    """
    ordered = sorted(scores, key=lambda pair: sign * pair[0])
    middle = (len(ordered) - 1) // 2
    return [ordered[rank][1] for rank in sorted(range(len(ordered)), key=lambda rank: abs(rank - middle))]


SEED = "run.seed"
_NOT_COMPARED = (
    SEED, "run.dir", "run.resume", "run.log_every", "run.tensorboard", "run.ledger", "run.threads", "run.profile_step",
    "schedule.stop_after", "checkpoint.", "supervise.", "data.cache", "data.workers", "data.verify", "loader.",
    "engine.timeout_minutes",
)  # fmt: skip
"""Keys that do not change a run's metrics; a name with a dot at the end represents all keys of a section.

Runs that differ only in these, because one was stopped, resumed or run elsewhere, are seeds of one configuration."""
MOST_IN_LABEL = 8
"""Differing keys that a label has room for. Of more, as runs of several tasks have, the table of differences tells."""


@dataclass(frozen=True)
class MetricSummary:
    """A validation metric over the runs of a group: the value of each run, and the step at which it was measured."""

    values: list[float]
    steps: list[int]

    @property
    def mean(self) -> float:
        """The mean over the runs."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """The sample standard deviation over the runs (n - 1); None for a single run."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class RunGroup:
    """The runs of one configuration, which differ in nothing but the seed."""

    label: str
    runs: list[RunRecord]

    @property
    def seeds(self) -> list[str]:
        """The seed of each run, ``?`` where it is not recorded."""
        return [str(run.config.get(SEED, "?")) for run in self.runs]

    def final(self, metric: str) -> MetricSummary | None:
        """The last value of ``metric`` in each run that has it; None where no run does."""
        return self._summary(metric, lambda values: len(values) - 1)

    def best(self, metric: str) -> MetricSummary | None:
        """The best value of ``metric`` in each run; None where it is not known whether higher or lower is better."""
        sign = direction(metric)
        if sign == 0:
            return None
        return self._summary(metric, lambda values: max(range(len(values)), key=lambda i: sign * values[i]))

    def _summary(self, metric: str, choose: Any) -> MetricSummary | None:
        values: list[float] = []
        steps: list[int] = []
        for run in self.runs:
            finite = [(s, v) for s, v in zip(*run.series(metric, validation=True), strict=True) if math.isfinite(v)]
            if finite:
                step, value = finite[choose([v for _, v in finite])]
                steps.append(step)
                values.append(value)
        return MetricSummary(values, steps) if values else None


@dataclass(frozen=True)
class Comparison:
    """All runs of a report, in groups, and the configuration keys (without the seed) in which these differ."""

    groups: list[RunGroup]
    differing: list[str]

    @property
    def runs(self) -> list[RunRecord]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    def keys(self, *, validation: bool) -> list[str]:
        """The names of the curves that at least one run logged."""
        return list(dict.fromkeys(key for run in self.runs for key in run.keys(validation=validation)))

    def is_repeated(self, key: str) -> bool:
        """Return whether ``key`` is the total loss, and in all runs the same numbers as one of its parts or a bound."""
        if key != "loss":
            return False
        others = {*self.keys(validation=False), *self.keys(validation=True)} - {key}

        def is_in(run: RunRecord, other: str, validation: bool) -> bool:
            steps, values = run.series(key, validation=validation)
            return not steps or (steps, values) == run.series(other, validation=validation)

        return any(all(is_in(run, other, v) for run in self.runs for v in (False, True)) for other in others)


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Group runs by their configuration, in the given order; keys that do not change a run's metrics are ignored."""
    keys = sorted(key for key in {key for run in runs for key in run.config} if not is_not_compared(key))
    differing = [key for key in keys if len({_value_text(run, key) for run in runs}) > 1]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        members.setdefault(tuple(_value_text(run, key) for key in differing), []).append(run)
    groups = []
    for number, (values, group) in enumerate(members.items()):
        if len(differing) > MOST_IN_LABEL:
            label = f"{_letters(number)}: {group[0].folder.resolve().name}"
        elif differing:
            label = ", ".join(f"{key}={value}" for key, value in zip(differing, values, strict=True))
            label = f"{_letters(number)}: {label}"
        else:
            label = runs[0].folder.resolve().name
        groups.append(RunGroup(label, group))
    return Comparison(groups, differing)


def is_not_compared(key: str) -> bool:
    """Return whether a key is the seed, or one that does not change a run's metrics."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in _NOT_COMPARED)


def _value_text(run: RunRecord, key: str) -> str:
    value = run.config.get(key, "unset")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _letters(number: int) -> str:
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)
