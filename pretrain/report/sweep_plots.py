"""The figures of sweeps: learning curves, and the score against each hyperparameter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from capt.pretrain.base.errors import DataError
from capt.pretrain.report.document import ReportFigure
from capt.pretrain.report.plots import HIDDEN, Theme, colour, count_steps, draw, legend_lines, style_axis
from capt.pretrain.report.runs import read_run
from capt.pretrain.report.sweeps import Configuration, Study, SweepRecord, is_number

EARLY_STEPS = 1000
"""Steps of the close-up: where CAPT is said to fine-tune faster (Luo et al. 2020, 5.3 and Figure 3)."""

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

    def early_mean(self) -> float:
        """The mean of the median curve over the validations of the first 1,000 steps; NaN without one."""
        values = [value for step, value in zip(*self.median(), strict=True) if step <= EARLY_STEPS]
        return statistics.fmean(values) if values else math.nan


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


def curve_figures(names: Sequence[str], curves: Mapping[str, Sequence[Curves | None]]) -> list[ReportFigure]:
    """Metric against step, with a panel per study and a colour per sweep; for long runs also a close-up of the start.

    ``curves`` are by study, in the order of the sweeps ``names``.
    """
    if not curves:
        return []
    figures = [_curve_figure("curves", names, curves, None)]
    if max(one.last for several in curves.values() for one in several if one) > EARLY_STEPS:
        close = {
            study: several
            for study, several in curves.items()
            if any(one and not math.isnan(one.early_mean()) for one in several)
        }
        if close:
            figures.append(_curve_figure("curves-start", names, close, EARLY_STEPS))
    return figures


def _curve_figure(
    name: str, names: Sequence[str], curves: Mapping[str, Sequence[Curves | None]], last: int | None
) -> ReportFigure:
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
        if len(distinct) <= 6:
            axis.set_xticks(distinct, [f"{value:g}" for value in distinct])
            axis.set_xticks([], minor=True)
        return lambda value: value
    axis.set_xticks(range(len(distinct)), [str(value) for value in distinct])
    return distinct.index


def _legend(names: Sequence[str], text: str) -> Callable[[Theme], list[Line2D]]:
    return lambda theme: [*legend_lines(names, theme), Line2D([], [], linestyle="none", label=text)]
