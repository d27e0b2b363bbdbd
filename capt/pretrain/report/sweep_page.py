"""The report of one sweep or of several: its sections and figures, and the same numbers as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from capt.pretrain.base.errors import DataError
from capt.pretrain.report.document import ReportFigure, ReportSection, Table
from capt.pretrain.report.plots import HIDDEN, Theme, colour, count_steps, draw, legend_lines, style_axis
from capt.pretrain.report.runs import read_run
from capt.pretrain.report.sweeps import (
    Configuration,
    Study,
    SweepRecord,
    Trial,
    comparable,
    format_number,
    is_number,
)

_LOGARITHMIC_FROM = 5.0  # largest over smallest value


@dataclass(frozen=True)
class Curves:
    """The learning curves of one configuration: steps and values of the study's metric, for each seed."""

    metric: str
    seeds: list[tuple[list[int], list[float]]]

    @property
    def last(self) -> int:
        """The last step of all seeds."""
        return max(steps[-1] for steps, _ in self.seeds)

    def median(self) -> tuple[list[int], list[float]]:
        """The steps that every seed has, and the median over the seeds at each."""
        by_seed = [dict(zip(steps, values, strict=True)) for steps, values in self.seeds]
        common = sorted(set.intersection(*(set(curve) for curve in by_seed)))
        return common, [statistics.median(curve[step] for curve in by_seed) for step in common]


def read_curves(study: Study, configuration: Configuration) -> Curves | None:
    """Read the learning curves of a configuration; None where no run folder is left."""
    seeds = []
    for trial in configuration.trials:
        if not trial.done:
            continue
        try:
            steps, values = read_run(trial.path).series(study.metric, validation=True)
        except DataError:  # the folder was removed, or is on another machine
            continue
        if steps:
            seeds.append((steps, values))
    return Curves(study.metric, seeds) if seeds else None


def curve_figure(
    name: str, names: Sequence[str], curves: Mapping[str, Sequence[Curves | None]], last: int | None = None
) -> ReportFigure:
    """Draw metric against step, with a panel per study and a colour per sweep; a close-up ends at the step ``last``.

    ``curves`` are by study, in the order of the sweeps ``names``.
    """

    def paint(axis: Axes, study: str, theme: Theme) -> None:
        drawn = [(number, one) for number, one in enumerate(curves[study]) if one]
        for number, one in drawn:
            shade = colour(number, theme)
            for steps, values in one.seeds:
                axis.plot(steps, values, color=shade, linewidth=0.7, alpha=0.45, label=HIDDEN)
            steps, values = one.median()
            label = f"{names[number]}, median"
            axis.plot(steps, values, color=shade, linewidth=1.8, marker="o", markersize=3, label=label)
        style_axis(axis, study, "optimizer step", drawn[0][1].metric, theme)
        count_steps(axis, last or max(one.last for _, one in drawn))

    return draw(name, list(curves), _legend(names, "thin: each seed; thick: median"), paint)


def parameter_figures(names: Sequence[str], sweeps: Sequence[SweepRecord]) -> list[ReportFigure]:
    """Score against hyperparameter, with a panel per study and parameter that varies; no figure if none does."""

    def paint(axis: Axes, panel: tuple[str, str], theme: Theme) -> None:
        name, key = panel
        studies = [sweep.study(name) for sweep in sweeps]
        points_of_sweeps = [_points(study, key) if study else {} for study in studies]
        metric = next(study.metric for study in studies if study)
        place = _axis_of(axis, [value for points in points_of_sweeps for value in points])
        for number, points in enumerate(points_of_sweeps):
            shade = colour(number, theme)
            for value, scores in points.items():
                axis.plot([place(value)] * len(scores), scores, ".", color=shade, alpha=0.5, markersize=5)
            middle = [(place(value), statistics.median(scores)) for value, scores in points.items()]
            line = zip(*sorted(middle), strict=True) if middle else ((), ())
            axis.plot(*line, color=shade, linewidth=1.6, label=f"{names[number]}, median")
        style_axis(axis, name, key, metric, theme)

    panels = _varied(sweeps)
    return [draw("hyperparameters", panels, _legend(names, "dots: trials; line: median"), paint)] if panels else []


def _varied(sweeps: Sequence[SweepRecord]) -> list[tuple[str, str]]:
    """(study, parameter) where the parameter takes more than one value."""
    values: dict[tuple[str, str], set[str]] = {}
    for sweep in sweeps:
        for study in sweep.studies:
            for configuration in study.configurations:
                for key, value in configuration.params.items():
                    values.setdefault((study.name, key), set()).add(str(value))
    return [panel for panel, distinct in values.items() if len(distinct) > 1]


def _points(study: Study, key: str) -> dict[Any, list[float]]:
    points: dict[Any, list[float]] = {}
    for configuration in study.configurations:
        if configuration.scores and key in configuration.params:
            value = configuration.params[key]
            points.setdefault(value if is_number(value) else str(value), []).extend(configuration.scores)
    return points


def _axis_of(axis: Axes, values: Sequence[Any]) -> Any:
    """Scale the x axis for ``values`` and return the place of each: numbers in place, anything else in equal steps."""
    distinct = list(dict.fromkeys(values))
    if distinct and all(is_number(value) for value in distinct):
        low, high = min(distinct), max(distinct)
        if low > 0 and high / low >= _LOGARITHMIC_FROM:
            axis.set_xscale("log")
        # A tick for each of few values.
        if len(distinct) <= 6:
            axis.set_xticks(distinct, [f"{value:g}" for value in distinct])
            axis.set_xticks([], minor=True)
        return lambda value: value
    axis.set_xticks(range(len(distinct)), [str(value) for value in distinct])
    return distinct.index


def _legend(names: Sequence[str], text: str) -> Callable[[Theme], list[Line2D]]:
    return lambda theme: [*legend_lines(names, theme), Line2D([], [], linestyle="none", label=text)]


_BEST_RULE = (
    "The best configuration is the one with the best median over its seeds; ± is the sample standard deviation. "
    "† marks a seed that is not a result: the trial predicted a constant, or was no better than one that does."
)
_CURVES_REMARK = (
    "Curves of several sweeps are of the configuration with the best sum of medians, the same in all where they share "
    "one."
)


def sweep_title(sweeps: Sequence[SweepRecord]) -> str:
    """The title of the report."""
    return f"Sweep {sweeps[0].name}" if len(sweeps) == 1 else f"Comparison of {len(sweeps)} sweeps"


def sweep_names(sweeps: Sequence[SweepRecord]) -> list[str]:
    """A name for each sweep: its folder's, with a letter where there are several."""
    if len(sweeps) == 1:
        return [sweeps[0].name]
    return [f"{chr(ord('A') + number)}: {sweep.name}" for number, sweep in enumerate(sweeps)]


def sweep_sections(sweeps: Sequence[SweepRecord], added: Sequence[ReportSection] = ()) -> list[ReportSection]:
    """The sections: overview, results, the tasks' own sections, flagged trials, learning curves, hyperparameters."""
    names = sweep_names(sweeps)
    notes = [f"{name}: {note}" for name, sweep in zip(names, sweeps, strict=True) for note in sweep.notes]
    curves = _curves(sweeps)
    return [
        ReportSection("", notes=notes, tables=[_overview_table(names, sweeps)]),
        _results(names, sweeps),
        *added,
        ReportSection("Trials that are no result", tables=[_flagged_table(names, sweeps)]),
        ReportSection(
            "Learning curves",
            remarks=[_CURVES_REMARK] if len(sweeps) > 1 else ["Curves are of the best configuration of each study."],
            figures=[curve_figure("curves", names, curves)] if curves else [],
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
    letters = [name.split(":")[0] for name in names]
    header = ["study, median", *names, *(f"{letter} - {letters[0]}" for letter in letters[1:])]
    rows = [
        [study, *map(format_number, of), *("" if math.isnan(x - of[0]) else f"{x - of[0]:+.4f}" for x in of[1:])]
        for study, of in medians.items()
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


def _study_names(sweeps: Sequence[SweepRecord]) -> list[str]:
    return list(dict.fromkeys(study.name for sweep in sweeps for study in sweep.studies))
