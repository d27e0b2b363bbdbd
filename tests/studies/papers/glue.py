"""The GLUE sections of a sweep's report: Table 2 of the CAPT paper, its rows beside ours, and the gap to each.

Luo et al. 2020 say in 3.3 that dev results are the median of several runs and in the caption of Table 2 that they are
averaged over 5 seeds; so ours show the median first, and the mean and the standard deviation under it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capt.finetune.glue.tasks import GLUE
from capt.pretrain.report.document import ReportSection, Table
from capt.pretrain.report.sweep_page import sweep_names
from capt.pretrain.report.sweeps import Configuration, Study, SweepRecord
from tests.studies.papers.glue_pretraining import begins_from_several, pretraining_sections

# The two averages of a table of GLUE results: that of the CAPT paper and that of the leaderboard.


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


PUBLISHED_DEV: dict[str, tuple[float, ...]] = {
    "BERT": (60.6, 93.2, 88.0, 90.0, 91.3, 86.6, 92.3, 70.4, 84.0),
    "XLNet": (63.6, 95.6, 89.2, 91.8, 91.8, 89.8, 93.9, 83.8, 87.4),
    "RoBERTa": (68.0, 96.4, 90.9, 92.4, 92.2, 90.2, 94.7, 86.6, 88.9),
    "ELECTRA": (69.3, 96.0, 90.6, 92.1, 92.4, 90.5, 94.5, 86.8, 89.0),
    "CAPT": (69.2, 96.5, 92.1, 92.5, 92.3, 90.7, 95.0, 88.0, 89.5),
}
"""Dev results of the 24-layer models in Table 2, by :data:`CAPT_TASKS`, and the average printed there."""

PUBLISHED_TEST: dict[str, tuple[float, ...]] = {
    "BERT": (60.5, 94.9, 85.4, 87.6, 89.3, 86.7, 92.7, 70.1, 83.4),
    "SpanBERT": (64.3, 94.8, 87.9, 89.9, 89.5, 88.1, 94.3, 79.0, 86.0),
    "RoBERTa": (63.8, 96.3, 88.1, 91.9, 90.0, 89.8, 94.8, 86.0, 87.6),
    "CAPT": (64.7, 96.8, 88.9, 91.5, 89.7, 90.0, 94.7, 86.9, 87.9),
}
"""Test results of Table 2: single models, submitted to the leaderboard."""

_REMARKS = [
    "Published rows are those of Table 2 (24-layer models; Luo et al. 2020), in per cent. Ours are medians over the "
    "seeds of the best configuration on the dev set: Matthews for CoLA, Pearson for STS-B, accuracy for the others, "
    "MNLI matched.",
    "Avg is CAPT's: the plain mean of the eight columns. Leaderboard is the leaderboard's average, on the dev set "
    "(accuracy with F1, Pearson with Spearman, matched with mismatched; WNLI where measured). A dagger marks a column "
    "in which a seed is not a result.",
]


@dataclass(frozen=True)
class GlueResults:
    """The GLUE results of one sweep: the study of each task (the better one where several have the same task)."""

    name: str
    studies: dict[str, Study]
    notes: list[str]

    def best(self, task: str) -> Configuration | None:
        """The best configuration of a task's study."""
        return self.studies[task].best if task in self.studies else None

    def medians(self) -> dict[str, dict[str, float]]:
        """All metrics of the best configurations, by task, as medians over the seeds."""
        medians_by_task: dict[str, dict[str, float]] = {}
        for task, study in self.studies.items():
            if study.best is None:
                continue
            names = dict.fromkeys(name for trial in study.best.trials for name in trial.metrics)
            values = {name: study.best.metric_median(name) for name in names}
            medians_by_task[task] = {name: value for name, value in values.items() if value is not None}
            medians_by_task[task][study.metric] = study.best.median
        return medians_by_task


def sections(sweeps: Sequence[SweepRecord]) -> list[ReportSection]:
    """Table 2 of the sweeps of one initial model, Figure 3 of those of several; none where no sweep has a GLUE task."""
    results = [
        results_of_sweep(name, sweep)
        for name, sweep in zip(sweep_names(sweeps), sweeps, strict=True)
        if not begins_from_several(sweep)
    ]
    figure_3 = pretraining_sections(sweeps)
    tasks = [task for task in CAPT_TASKS if any(result.best(task) for result in results)]
    if not tasks:
        return figure_3
    notes = [note for result in results for note in result.notes]
    lacking = [task for task in CAPT_TASKS if task not in tasks]
    if lacking:
        missing = ", ".join(GLUE[task].folder for task in lacking)
        notes.append(f"not measured: {missing}; Avg stays empty, the average of the measured columns is beside it")
    tables = [_table(results, tasks), _spread_table(results), _gap_table(results), _test_table()]
    data = {result.name: _data(result) for result in results}
    table_2 = ReportSection("GLUE (CAPT, Table 2)", notes=notes, tables=tables, remarks=_REMARKS, data=data)
    return [table_2, *figure_3]


def results_of_sweep(name: str, sweep: SweepRecord) -> GlueResults:
    """Find the study of each task in ``sweep``."""
    studies: dict[str, Study] = {}
    notes = []
    for study in sweep.studies:
        task = study.config.get("data.task")
        if study.config.get("task.type") != "glue" or task not in GLUE or study.best is None:
            continue
        if study.metric not in GLUE[task].metrics:
            notes.append(f"{name}: {study.name} was selected by {study.metric}, no metric of {GLUE[task].folder}")
            continue
        rival = studies.get(task)
        if rival is None or rival.best is None or study.sign * study.best.median > study.sign * rival.best.median:
            studies[task] = study
        if rival is not None:
            notes.append(f"{name}: {rival.name} and {study.name} are both {task}: the better counts")
        notes += _size_note(name, task, study)
    return GlueResults(name, studies, notes)


def _size_note(name: str, task: str, study: Study) -> list[str]:
    rows = study.best.metric_median("validation_samples") if study.best else None
    official = sum(count for split, count in GLUE[task].rows.items() if split.startswith("dev"))
    if rows is None or rows == official:
        return []
    return [
        f"{name}: {GLUE[task].folder} was measured on {rows:,.0f} dev rows, the official set has {official:,}: "
        "the column does not compare with the published rows"
    ]


def _header(*more: str) -> list[str]:
    return ["model", "source", *(GLUE[task].folder for task in CAPT_TASKS), "Avg", *more]


def _table(results: Sequence[GlueResults], tasks: Sequence[str]) -> Table:
    """Published dev rows and ours; the columns are in per cent."""
    # Where tasks are missing, all rows are averaged over the measured tasks too, so that they compare.
    partial = len(tasks) < len(CAPT_TASKS)
    extra = [f"Avg of {len(tasks)} measured"] if partial else []
    rows = []
    for model, values in PUBLISHED_DEV.items():
        columns = dict(zip(CAPT_TASKS, values, strict=False))
        part = [f"{statistics.fmean(columns[task] for task in tasks):.1f}"] if partial else []
        rows.append([model, "published, dev", *(f"{value:.1f}" for value in values), *part, ""])
    for result in results:
        medians = result.medians()
        cells = [_percent(_selecting(medians, task)) + _mark(result, task) for task in CAPT_TASKS]
        own = [_selecting(medians, task) for task in tasks]
        part = [_percent(_mean(own))] if partial else []
        rows.append(
            [result.name, _source(result), *cells, _percent(capt_average(medians)), *part, _leaderboard(medians)]
        )
    return Table(_header(*extra, "Leaderboard"), rows)


def _spread_table(results: Sequence[GlueResults]) -> Table:
    rows = []
    for result in results:
        configurations = [result.best(task) for task in CAPT_TASKS]
        means = [_percent(c.mean if c else None) for c in configurations]
        stds = [_percent(c.std if c else None, digits=2) for c in configurations]
        average = [c.mean for c in configurations if c]
        rows.append([result.name, "mean", *means, _percent(_mean(average)) if len(average) == len(CAPT_TASKS) else ""])
        rows.append([result.name, "standard deviation", *stds, ""])
    return Table(_header(), rows)


def _gap_table(results: Sequence[GlueResults]) -> Table:
    """Ours minus each published row, in points."""
    rows = []
    for result in results:
        medians = result.medians()
        average = capt_average(medians)
        for model, gaps in _gaps(medians).items():
            last = "" if average is None else f"{100 * average - PUBLISHED_DEV[model][-1]:+.1f}"
            cells = [f"{gaps[task]:+.1f}" if task in gaps else "" for task in CAPT_TASKS]
            rows.append([f"{result.name} - {model}", "gap, points", *cells, last])
    return Table(_header(), rows)


def _gaps(medians: Scores) -> dict[str, dict[str, float]]:
    return {
        model: {
            task: 100 * value - published
            for task, published in zip(CAPT_TASKS, values, strict=False)
            if (value := _selecting(medians, task)) is not None
        }
        for model, values in PUBLISHED_DEV.items()
    }


def _test_table() -> Table:
    rows = [
        [model, "published, test", *(f"{value:.1f}" for value in values)] for model, values in PUBLISHED_TEST.items()
    ]
    return Table(_header(), rows, details="Published test results (their labels are not public: submit to compare)")


def _data(result: GlueResults) -> dict[str, Any]:
    medians = result.medians()
    return {
        "medians": medians,
        "capt_average": capt_average(medians),
        "leaderboard_average": leaderboard_average(medians),
        "gaps": _gaps(medians),
    }


def _selecting(medians: Mapping[str, Mapping[str, float]], task: str) -> float | None:
    return medians.get(task, {}).get(GLUE[task].metric)


def _mark(result: GlueResults, task: str) -> str:
    best = result.best(task)
    return "†" if best and any(trial.done and trial.flag for trial in best.trials) else ""


def _source(result: GlueResults) -> str:
    counts = sorted({len(best.scores) for task in CAPT_TASKS if (best := result.best(task))})
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "no"
    return f"ours, dev, median of {seeds} seeds"


def _leaderboard(medians: Mapping[str, Mapping[str, float]]) -> str:
    return _percent(leaderboard_average(medians))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}"
