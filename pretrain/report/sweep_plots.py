"""The figures of sweeps: learning curves, and the score against each hyperparameter."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from pretrain.base.errors import DataError
from pretrain.report.document import Figure
from pretrain.report.plots import Theme, canvas, colour, count_steps, dress, png
from pretrain.report.runs import read_run
from pretrain.report.sweeps import Configuration, Study, Sweep

EARLY = 1000
"""Steps of the close-up: where CAPT is said to fine-tune faster (Luo et al. 2020, 5.3 and Figure 3)."""

_LOGARITHMIC_FROM = 5.0  # largest over smallest value


@dataclass(frozen=True)
class Curves:
    """The study's metric at each validation, a curve a seed of one configuration."""

    metric: str
    seeds: list[tuple[list[int], list[float]]]

    @property
    def last(self) -> int:
        """The last step of all."""
        return max(steps[-1] for steps, _ in self.seeds)

    def median(self) -> tuple[list[int], list[float]]:
        """Steps that every seed has, and the median over the seeds."""
        by_seed = [dict(zip(steps, values, strict=True)) for steps, values in self.seeds]
        common = sorted(set.intersection(*(set(curve) for curve in by_seed)))
        return common, [statistics.median(curve[step] for curve in by_seed) for step in common]

    def early(self) -> float | None:
        """Mean of the median curve over the validations of the first 1,000 steps; None without one."""
        values = [value for step, value in zip(*self.median(), strict=True) if step <= EARLY]
        return statistics.fmean(values) if values else None


def read_curves(study: Study, configuration: Configuration) -> Curves | None:
    """The learning curves of a configuration; None where no run folder is left."""
    found = []
    for trial in configuration.trials:
        if not trial.done:
            continue
        try:
            steps, values = read_run(trial.run).series(study.metric, validation=True)
        except DataError:  # the folder was removed, or is on another machine
            continue
        if steps:
            found.append((steps, values))
    return Curves(study.metric, found) if found else None


def curve_figures(names: Sequence[str], curves: Mapping[str, Sequence[Curves | None]]) -> list[Figure]:
    """Metric against step, a panel a study, a colour a sweep; with a close-up of the start where runs are longer.

    ``curves`` are by study, in the order of the sweeps ``names``.
    """
    if not curves:
        return []
    figures = [_both("curves", _draw_curves, names, curves, None)]
    if max(one.last for several in curves.values() for one in several if one) > EARLY:
        close = {study: several for study, several in curves.items() if any(one and one.early() for one in several)}
        if close:
            figures.append(_both("curves-start", _draw_curves, names, close, EARLY))
    return figures


def parameter_figures(names: Sequence[str], sweeps: Sequence[Sweep]) -> list[Figure]:
    """Score against the value of each hyperparameter, a panel a study and parameter; none where nothing varies."""
    panels = _varied(sweeps)
    return [_both("hyperparameters", _draw_parameters, names, sweeps, panels)] if panels else []


def _both(name: str, draw: Any, *arguments: Any) -> Figure:
    return Figure(name, draw(*arguments, "light"), draw(*arguments, "dark"))


def _draw_curves(
    names: Sequence[str], curves: Mapping[str, Sequence[Curves | None]], last: int | None, theme: Theme
) -> bytes:
    figure, axes = canvas(len(curves), len(names) + 1, theme)
    for axis, (study, several) in zip(axes, curves.items(), strict=True):
        drawn = [(number, one) for number, one in enumerate(several) if one]
        for number, one in drawn:
            shade = colour(number, theme)
            for steps, values in one.seeds:
                axis.plot(steps, values, color=shade, linewidth=0.7, alpha=0.45)
            steps, values = one.median()
            axis.plot(steps, values, color=shade, linewidth=1.8, marker="o", markersize=3)
        dress(axis, study, "optimizer step", drawn[0][1].metric, theme)
        count_steps(axis, last or max(one.last for _, one in drawn))
    return png(figure, [*_legend(names, theme), _entry("thin: each seed; thick: median")], theme)


def _varied(sweeps: Sequence[Sweep]) -> list[tuple[str, str]]:
    """(study, parameter) where the parameter takes more than one value."""
    values: dict[tuple[str, str], set[str]] = {}
    for sweep in sweeps:
        for study in sweep.studies:
            for configuration in study.configurations:
                for key, value in configuration.params.items():
                    values.setdefault((study.name, key), set()).add(str(value))
    return [panel for panel, found in values.items() if len(found) > 1]


def _draw_parameters(
    names: Sequence[str], sweeps: Sequence[Sweep], panels: Sequence[tuple[str, str]], theme: Theme
) -> bytes:
    figure, axes = canvas(len(panels), len(names) + 1, theme)
    for axis, (name, key) in zip(axes, panels, strict=True):
        studies = [next((s for s in sweep.studies if s.name == name), None) for sweep in sweeps]
        found = [_points(study, key) if study else {} for study in studies]
        metric = next(study.metric for study in studies if study)
        place = _axis_of(axis, [value for points in found for value in points])
        for number, points in enumerate(found):
            shade = colour(number, theme)
            for value, scores in points.items():
                axis.plot([place(value)] * len(scores), scores, ".", color=shade, alpha=0.5, markersize=5)
            middle = [(place(value), statistics.median(scores)) for value, scores in points.items()]
            axis.plot(*zip(*sorted(middle), strict=True) if middle else ((), ()), color=shade, linewidth=1.6)
        dress(axis, name, key, metric, theme)
    return png(figure, [*_legend(names, theme), _entry("dots: trials; line: median")], theme)


def _points(study: Study, key: str) -> dict[Any, list[float]]:
    points: dict[Any, list[float]] = {}
    for configuration in study.configurations:
        if configuration.scores and key in configuration.params:
            value = configuration.params[key]
            points.setdefault(value if _is_number(value) else str(value), []).extend(configuration.scores)
    return points


def _axis_of(axis: Axes, values: Sequence[Any]) -> Any:
    """Scale the x axis for ``values`` and return where each stands: numbers in place, anything else in equal steps."""
    distinct = list(dict.fromkeys(values))
    if distinct and all(_is_number(value) for value in distinct):
        low, high = min(distinct), max(distinct)
        if low > 0 and high / low >= _LOGARITHMIC_FROM:
            axis.set_xscale("log")
        if len(distinct) <= 6:
            axis.set_xticks(distinct, [f"{value:g}" for value in distinct])
            axis.set_xticks([], minor=True)
        return lambda value: value
    axis.set_xticks(range(len(distinct)), [str(value) for value in distinct])
    return distinct.index


def _legend(names: Sequence[str], theme: Theme) -> list[Line2D]:
    return [Line2D([], [], color=colour(i, theme), linewidth=3, label=name) for i, name in enumerate(names)]


def _entry(text: str) -> Line2D:
    return Line2D([], [], linestyle="none", label=text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
