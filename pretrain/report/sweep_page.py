"""The report of one sweep or of several: its sections, and the same numbers as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from capt.pretrain.report.document import ReportSection, Table
from capt.pretrain.report.runs import task_sections
from capt.pretrain.report.sweep_plots import EARLY_STEPS, Curves, curve_figures, parameter_figures, read_curves
from capt.pretrain.report.sweeps import Configuration, Study, SweepRecord, Trial, comparable

_BEST_RULE = (
    "The best configuration is the one with the best median over its seeds; ± is the sample standard deviation. "
    "† marks a seed that is not a result: the trial predicted a constant, or was no better than one that does."
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
                "run": str(trial.path),
            }
            for trial in configuration.trials
        ],
    }


def _overview_table(names: Sequence[str], sweeps: Sequence[SweepRecord]) -> Table:
    rows = []
    for name, sweep in zip(names, sweeps, strict=True):
        trials = [trial for study in sweep.studies for trial in study.trials]
        seeds = sorted({len(study.seeds) for study in sweep.studies})
        rows.append(
            {
                "sweep": name,
                "folder": str(sweep.folder),
                "studies": str(len(sweep.studies)),
                "seeds": "/".join(map(str, seeds)),
                **{state: str(sum(trial.state == state for trial in trials)) for state in ("done", "failed", "pruned")},
                "trial hours": f"{sum(trial.seconds for trial in trials) / 3600:.2f}",
            }
        )
    return Table.of(rows)


def _results(names: Sequence[str], sweeps: Sequence[SweepRecord]) -> ReportSection:
    several = len(sweeps) > 1
    rows = [
        _result_row(study, {"sweep": name} if several else {})
        for study_name in _study_names(sweeps)
        for name, sweep in zip(names, sweeps, strict=True)
        if (study := sweep.study(study_name))
    ]
    tables = [Table.of(rows), *([_difference_table(names, sweeps)] if several else [])]
    return ReportSection("Results", tables=tables, remarks=[_BEST_RULE])


def _result_row(study: Study, sweep: dict[str, str]) -> dict[str, str]:
    best = study.best
    of_best = dict.fromkeys(("median", "mean", "all seeds", "other metrics (median)"), "")
    if best is not None:
        names = dict.fromkeys(name for trial in best.trials for name in trial.metrics)
        medians = [(name, best.metric_median(name)) for name in names if name not in (study.metric, "degenerate")]
        of_best = {
            "median": format_number(best.median),
            "mean": format_number(best.mean) + (f" ± {best.std:.2g}" if best.std is not None else ""),
            "all seeds": ", ".join(_seed_text(trial) for trial in best.trials),
            "other metrics (median)": ", ".join(f"{key} {format_number(of)}" for key, of in medians if of is not None),
        }
    metric = f"{study.metric} {'↓' if study.mode == 'min' else '↑'}"
    label = best.label if best is not None else "no trial has a score"
    return {"study": study.name, "metric": metric, **sweep, "best configuration": label, **of_best}


def _seed_text(trial: Trial) -> str:
    text = format_number(trial.score) if trial.done and trial.score is not None else trial.state
    return f"{text}†" if trial.done and trial.flag else text


def _difference_table(names: Sequence[str], sweeps: Sequence[SweepRecord]) -> Table:
    """The median of each sweep, and its difference from that of the first sweep."""
    studies = {name: [sweep.study(name) for sweep in sweeps] for name in _study_names(sweeps)}
    medians = {
        name: [study.best.median if study and study.best else math.nan for study in several]
        for name, several in studies.items()
    }
    return _beside_the_first("study, median", names, medians)


def _beside_the_first(title: str, names: Sequence[str], values: Mapping[str, Sequence[float]]) -> Table:
    """A row for each study: the value of each sweep, and its difference from that of the first sweep."""
    letters = [name.split(":")[0] for name in names]
    header = [title, *names, *(f"{letter} - {letters[0]}" for letter in letters[1:])]
    rows = [
        [study, *map(format_number, of), *("" if math.isnan(x - of[0]) else f"{x - of[0]:+.4f}" for x in of[1:])]
        for study, of in values.items()
    ]
    return Table(header, rows)


def _flagged_table(names: Sequence[str], sweeps: Sequence[SweepRecord]) -> Table:
    rows = [
        [name, study.name, setting.label, str(trial.seed), trial.flag, format_number(trial.score), trial.error]
        for name, sweep in zip(names, sweeps, strict=True)
        for study in sweep.studies
        for setting in study.configurations
        for trial in setting.trials
        if trial.flag and trial.state != "pruned"
    ]
    return Table(["sweep", "study", "configuration", "seed", "why", "score", "error"], rows)


def _configurations_table(study: Study, details: str) -> Table:
    keys = list(dict.fromkeys(key for c in study.configurations for key in c.params))
    rows = []
    for c in study.configurations:
        values = [str(c.params.get(key, "")) for key in keys]
        numbers = [format_number(c.median), format_number(c.mean), "" if c.std is None else f"{c.std:.2g}"]
        scores = ", ".join(_seed_text(trial) for trial in c.trials)
        rows.append([*values, *numbers, scores, "best" if c is study.best else ""])
    return Table([*keys, f"median {study.metric}", "mean", "std", "all seeds", ""], rows, details=details)


def _curves(sweeps: Sequence[SweepRecord]) -> dict[str, list[Curves | None]]:
    curves: dict[str, list[Curves | None]] = {}
    for study_name in _study_names(sweeps):
        studies = [sweep.study(study_name) for sweep in sweeps]
        pairs = zip(studies, comparable(studies), strict=True)
        several = [read_curves(study, chosen) if study and chosen else None for study, chosen in pairs]
        if any(several):
            curves[study_name] = several
    return curves


def _early_table(names: Sequence[str], curves: dict[str, list[Curves | None]]) -> Table:
    means = {study: [one.early_mean() if one else math.nan for one in several] for study, several in curves.items()}
    return _beside_the_first(f"study, first {EARLY_STEPS:,} steps", names, means)


def _study_names(sweeps: Sequence[SweepRecord]) -> list[str]:
    return list(dict.fromkeys(study.name for sweep in sweeps for study in sweep.studies))


def format_number(value: float | None) -> str:
    """``value`` with at most four decimals; empty for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1000 else f"{value:.4g}"
