"""The report of one sweep or of several: its sections, and the same numbers as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from capt.pretrain.report.document import ReportSection, Table
from capt.pretrain.report.runs import task_sections
from capt.pretrain.report.sweep_plots import EARLY_STEPS, Curves, curve_figures, parameter_figures, read_curves
from capt.pretrain.report.sweeps import Configuration, Study, SweepRecord, Trial, comparable

_BEST_RULE = (
    "The best configuration is the one with the best median over its seeds; ± is the sample standard deviation. "
    "† marks a seed that is no result: the trial predicted a constant, or was no better than one that does."
)
_CURVES_REMARK = (
    "Curves of several sweeps are of the configuration with the best sum of medians, the same in all where they share "
    f"one. The table has the mean of the median curve over the validations of the first {EARLY_STEPS:,} steps."
)


def sweep_title(sweeps: Sequence[SweepRecord]) -> str:
    """The title of the report."""
    return f"Sweep {sweeps[0].name}" if len(sweeps) == 1 else f"Comparison of {len(sweeps)} sweeps"


def sweep_names(sweeps: Sequence[SweepRecord]) -> list[str]:
    """A name for each sweep: its folder's, with a letter where there are several."""
    if len(sweeps) == 1:
        return [sweeps[0].name]
    return [f"{chr(ord('A') + number)}: {sweep.name}" for number, sweep in enumerate(sweeps)]


def sweep_sections(sweeps: Sequence[SweepRecord]) -> list[ReportSection]:
    """The sections: overview, results, the tasks' own sections, flagged trials, learning curves, hyperparameters."""
    names = sweep_names(sweeps)
    notes = [f"{name}: {note}" for name, sweep in zip(names, sweeps, strict=True) for note in sweep.notes]
    curves = _curves(sweeps)
    return [
        ReportSection("", notes=notes, tables=[_overview_table(names, sweeps)]),
        _results(names, sweeps),
        *task_sections((str(study.config.get("task.type")) for s in sweeps for study in s.studies), "sections", sweeps),
        ReportSection("Trials that are no result", tables=[_flagged_table(names, sweeps)]),
        ReportSection(
            "Learning curves",
            tables=[_early_table(names, curves)] if len(sweeps) > 1 else [],
            remarks=[_CURVES_REMARK] if len(sweeps) > 1 else ["Curves are of the best configuration of each study."],
            figures=curve_figures(names, curves),
        ),
        ReportSection(
            "Hyperparameters",
            tables=[
                _configurations_table(study, f"All configurations of {study.name} ({name})")
                for name, sweep in zip(names, sweeps, strict=True)
                for study in sweep.studies
            ],
            figures=parameter_figures(names, sweeps),
        ),
    ]


def sweep_json(sweeps: Sequence[SweepRecord], sections: Sequence[ReportSection]) -> dict[str, Any]:
    """The unrounded numbers of the tables, and the data of the tasks' sections."""
    return {
        "sweeps": [
            {
                "folder": str(sweep.folder),
                "notes": sweep.notes,
                "studies": {study.name: _study_json(study) for study in sweep.studies},
            }
            for sweep in sweeps
        ],
        **{section.title: section.data for section in sections if section.data},
    }


def _study_json(study: Study) -> dict[str, Any]:
    return {
        "metric": study.metric,
        "mode": study.mode,
        "best": _configuration_json(study.best) if study.best else None,
        "configurations": [_configuration_json(configuration) for configuration in study.configurations],
    }


def _configuration_json(configuration: Configuration) -> dict[str, Any]:
    finished = bool(configuration.scores)
    return {
        "params": configuration.params,
        "median": configuration.median if finished else None,
        "mean": configuration.mean if finished else None,
        "std": configuration.std,
        "trials": [
            {
                **{key: getattr(trial, key) for key in ("seed", "state", "score", "best_step", "metrics", "flag")},
                **{key: getattr(trial, key) for key in ("seconds", "attempts", "error")},
                "run": str(trial.run),
            }
            for trial in configuration.trials
        ],
    }


def _overview_table(names: Sequence[str], sweeps: Sequence[SweepRecord]) -> Table:
    rows = []
    for name, sweep in zip(names, sweeps, strict=True):
        trials = [trial for study in sweep.studies for trial in study.trials]
        states = [str(sum(trial.state == state for trial in trials)) for state in ("done", "failed", "pruned")]
        seeds = sorted({len(study.seeds) for study in sweep.studies})
        hours = f"{sum(trial.seconds for trial in trials) / 3600:.2f}"
        rows.append([name, str(sweep.folder), str(len(sweep.studies)), "/".join(map(str, seeds)), *states, hours])
    return Table(["sweep", "folder", "studies", "seeds", "done", "failed", "pruned", "trial hours"], rows)


def _results(names: Sequence[str], sweeps: Sequence[SweepRecord]) -> ReportSection:
    header = ["study", "metric", "sweep", "best configuration", "median", "mean", "all seeds", "other metrics (median)"]
    several = len(sweeps) > 1
    rows = []
    for study_name in _study_names(sweeps):
        for name, sweep in zip(names, sweeps, strict=True):
            study = _study_of(sweep, study_name)
            if study:
                rows.append(_result_row(study, name))
    table = Table(header, rows)
    if not several:
        table = Table([*header[:2], *header[3:]], [[*row[:2], *row[3:]] for row in rows])
    tables = [table, *([_difference_table(names, sweeps)] if several else [])]
    return ReportSection("Results", tables=tables, remarks=[_BEST_RULE])


def _result_row(study: Study, sweep: str) -> list[str]:
    metric = f"{study.metric} {'↓' if study.mode == 'min' else '↑'}"
    best = study.best
    if best is None:
        return [study.name, metric, sweep, "no trial has a score", "", "", "", ""]
    mean = format_number(best.mean) + (f" ± {best.std:.2g}" if best.std is not None else "")
    seeds = ", ".join(_seed_text(trial) for trial in best.trials)
    names = dict.fromkeys(name for trial in best.trials for name in trial.metrics)
    medians = [(name, best.metric_median(name)) for name in names if name not in (study.metric, "degenerate")]
    others = ", ".join(f"{name} {format_number(value)}" for name, value in medians if value is not None)
    return [study.name, metric, sweep, best.label, format_number(best.median), mean, seeds, others]


def _seed_text(trial: Trial) -> str:
    text = format_number(trial.score) if trial.done and trial.score is not None else trial.state
    return f"{text}†" if trial.done and trial.flag else text


def _difference_table(names: Sequence[str], sweeps: Sequence[SweepRecord]) -> Table:
    """The median of each sweep, and its difference from that of the first sweep."""
    letters = [name.split(":")[0] for name in names]
    header = ["study, median", *names, *(f"{letter} - {letters[0]}" for letter in letters[1:])]
    rows = []
    for study_name in _study_names(sweeps):
        studies = [_study_of(sweep, study_name) for sweep in sweeps]
        medians = [study.best.median if study and study.best else math.nan for study in studies]
        rows.append([study_name, *map(format_number, medians), *(_signed(value - medians[0]) for value in medians[1:])])
    return Table(header, rows)


def _flagged_table(names: Sequence[str], sweeps: Sequence[SweepRecord]) -> Table:
    rows = [
        [name, study.name, _label_of(study, trial), str(trial.seed), trial.flag, _score_text(trial), trial.error]
        for name, sweep in zip(names, sweeps, strict=True)
        for study in sweep.studies
        for trial in study.trials
        if trial.flag and trial.state != "pruned"
    ]
    return Table(["sweep", "study", "configuration", "seed", "why", "score", "error"], rows)


def _configurations_table(study: Study, details: str) -> Table:
    keys = list(dict.fromkeys(key for c in study.configurations for key in c.params))
    rows = []
    for configuration in study.configurations:
        std = "" if configuration.std is None else f"{configuration.std:.2g}"
        scores = ", ".join(_seed_text(trial) for trial in configuration.trials)
        mark = "best" if configuration is study.best else ""
        values = [str(configuration.params.get(key, "")) for key in keys]
        rows.append(
            [*values, format_number(configuration.median), format_number(configuration.mean), std, scores, mark]
        )
    return Table([*keys, f"median {study.metric}", "mean", "std", "all seeds", ""], rows, details=details)


def _curves(sweeps: Sequence[SweepRecord]) -> dict[str, list[Curves | None]]:
    curves: dict[str, list[Curves | None]] = {}
    for study_name in _study_names(sweeps):
        studies = [_study_of(sweep, study_name) for sweep in sweeps]
        pairs = zip(studies, comparable(studies), strict=True)
        several = [read_curves(study, chosen) if study and chosen else None for study, chosen in pairs]
        if any(several):
            curves[study_name] = several
    return curves


def _early_table(names: Sequence[str], curves: dict[str, list[Curves | None]]) -> Table:
    rows = []
    for study, several in curves.items():
        means = [one.early_mean() if one else None for one in several]
        values = [math.nan if mean is None else mean for mean in means]
        rows.append([study, *map(format_number, values), *(_signed(value - values[0]) for value in values[1:])])
    letters = [name.split(":")[0] for name in names]
    header = [f"study, first {EARLY_STEPS:,} steps", *names, *(f"{letter} - {letters[0]}" for letter in letters[1:])]
    return Table(header, rows)


def _study_names(sweeps: Sequence[SweepRecord]) -> list[str]:
    return list(dict.fromkeys(study.name for sweep in sweeps for study in sweep.studies))


def _study_of(sweep: SweepRecord, name: str) -> Study | None:
    return next((study for study in sweep.studies if study.name == name), None)


def _label_of(study: Study, trial: Trial) -> str:
    return next(c.label for c in study.configurations if trial in c.trials)


def _score_text(trial: Trial) -> str:
    return "" if trial.score is None else format_number(trial.score)


def format_number(value: float) -> str:
    """``value`` with at most four decimals; empty for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1000 else f"{value:.4g}"


def _signed(value: float) -> str:
    return "" if math.isnan(value) else f"{value:+.4f}"
