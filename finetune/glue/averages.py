"""The two averages of a table of GLUE results: that of the CAPT paper and that of the leaderboard."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Scores = Mapping[str, Mapping[str, float]]
"""Metrics by task: ``{"cola": {"matthews": 0.6}, "mnli": {"accuracy": 0.9, "accuracy_mismatched": 0.9}, ...}``."""

CAPT_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
"""The columns of CAPT's Table 2, in its order."""

_LEADERBOARD: dict[str, tuple[str, ...]] = {
    "cola": ("matthews",),
    "sst2": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "stsb": ("pearson", "spearman"),
    "qqp": ("accuracy", "f1"),
    "mnli": ("accuracy", "accuracy_mismatched"),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}
_CAPT = {task: _LEADERBOARD[task][:1] for task in CAPT_TASKS}


def capt_average(scores: Scores) -> float | None:
    """The plain mean of CAPT's eight columns: Matthews for CoLA, Pearson for STS-B, accuracy elsewhere, MNLI matched.

    None while one of the eight is missing (Luo et al. 2020, Table 2).
    """
    return _average(scores, _CAPT)


def leaderboard_average(scores: Scores) -> float | None:
    """The leaderboard's macro average: a task's metrics are averaged first, then the tasks, with WNLI where measured.

    None while one of the others is missing.
    """
    return _average(scores, {task: names for task, names in _LEADERBOARD.items() if task != "wnli" or task in scores})


def _average(scores: Scores, columns: Mapping[str, Sequence[str]]) -> float | None:
    if any(name not in scores.get(task, {}) for task, names in columns.items() for name in names):
        return None
    return statistics.fmean(statistics.fmean(scores[task][name] for name in names) for task, names in columns.items())
