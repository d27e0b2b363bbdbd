"""What ``capt evaluate`` has measured of the checkpoints of runs: tables, and the pictures of retrieval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from matplotlib.axes import Axes

from capt.pretrain.config.retrieval import METRICS
from capt.pretrain.engine.judgement import direction
from capt.pretrain.engine.run_folder import Section
from capt.pretrain.report.compare import Comparison
from capt.pretrain.report.document import ReportFigure, ReportSection, Table
from capt.pretrain.report.plots import Theme, colour, draw, legend_lines, style_axis

ARROWS = {1: "↑", -1: "↓", 0: ""}
"""By `direction`: whether more or less is better."""

_NDCG = METRICS[0]
_FULL = "full"
_KINDS = {"positives": 2, "hard negatives": 1, "random negatives": 0}
"""Kinds of scores, and the number of the colour of each."""

Measured = dict[str, dict[str, Section]]
"""For each data set of retrieval what was measured on it, by run and checkpoint."""


def evaluation_sections(comparison: Comparison) -> list[ReportSection]:
    """The sections of what was evaluated; none where nothing was."""
    found = list(_measured(comparison))
    sets: Measured = {}
    for column, section in found:
        if any(_NDCG in figures for figures in section.poolers.values()):
            sets.setdefault(section.name, {})[column] = section
    return [*_tables(found), *([_retrieval(sets)] if sets else [])]


def _measured(comparison: Comparison) -> Iterator[tuple[str, Section]]:
    for run in comparison.runs:
        for checkpoint, sections in run.evaluations.items():
            for section in sections:
                yield f"{run.folder.resolve().name}, {checkpoint}", section


def _tables(found: list[tuple[str, Section]]) -> list[ReportSection]:
    """A table for each data set and protocol: a column for each checkpoint, a row for each figure and pooler."""
    columns: dict[tuple[str, str], dict[str, dict[str, float | None]]] = {}
    for column, section in found:
        figures = columns.setdefault((section.name, section.protocol), {}).setdefault(column, {})
        figures.update(section.metrics)
        for pooler, values in section.poolers.items():
            figures.update({f"{name} ({pooler})": value for name, value in values.items()})
    tables = []
    for (name, _), of in columns.items():
        rows = list(dict.fromkeys(figure for figures in of.values() for figure in figures))
        cells = [
            [f"{row} {ARROWS[direction(row.partition(' ')[0])]}".strip(), *(_figure(each, row) for each in of.values())]
            for row in rows
        ]
        tables.append(Table([name, *of], cells))
    remarks = [f"{name}: {protocol}" for name, protocol in columns]
    return [ReportSection("Evaluation", tables=tables, remarks=remarks)] if tables else []


def _figure(figures: Mapping[str, float | None], name: str) -> str:
    value = figures.get(name)
    return "" if value is None else f"{value:.4g}"


def _retrieval(sets: Measured) -> ReportSection:
    """All systems side by side, whatever their protocols, and pictures of them."""
    tables, figures = [], []
    for name, measured in sets.items():
        systems = _systems(measured)
        cells = [[system, *(_figure(values, metric) for metric in METRICS)] for system, values in systems.items()]
        tables.append(Table([f"{name}: system", *METRICS], cells))
        figures.append(_picture(f"retrieval-{name}", measured, systems))
        if any(section.scores is not None for section in measured.values()):
            figures.append(_scores(f"scores-{name}", measured))
    return ReportSection("Retrieval", tables=tables, figures=figures)


def _systems(measured: Mapping[str, Section]) -> dict[str, Mapping[str, float | None]]:
    """The figures of each model with whole vectors, and of what was measured beside them (BM25) once."""
    systems: dict[str, Mapping[str, float | None]] = {}
    for column, section in measured.items():
        for system, values in section.poolers.items():
            if system == _FULL:
                systems[column] = values
            elif not system.isdigit():
                systems[system] = values
    return systems


def _picture(
    name: str, measured: Mapping[str, Section], systems: Mapping[str, Mapping[str, float | None]]
) -> ReportFigure:
    """nDCG@10 of each system as a bar, and by the number of dimensions where several were measured."""
    by_dimension = {column: _by_dimension(section) for column, section in measured.items()}
    cut = {column: points for column, points in by_dimension.items() if len(points) > 1}
    names = list(systems)

    def bars(axis: Axes, theme: Theme) -> None:
        values = [systems[name].get(_NDCG) or 0.0 for name in names]
        drawn = axis.barh(range(len(names)), values, color=[colour(i, theme) for i in range(len(names))], height=0.6)
        style_axis(axis, f"{_NDCG} of each system", _NDCG, "", theme)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.bar_label(drawn, fmt=" %.3f", fontsize=8, color=axis.title.get_color())
        axis.set_xlim(0, 1.15 * max(values) if max(values) > 0 else 1)

    def curves(axis: Axes, theme: Theme) -> None:
        for column, points in cut.items():
            shade = colour(names.index(column), theme)
            axis.plot(*zip(*points, strict=True), color=shade, marker="o", markersize=3.5, linewidth=1.4, label=column)
        style_axis(axis, f"{_NDCG} by dimensions", "first numbers of each vector", _NDCG, theme)
        axis.set_xscale("log", base=2)
        places = sorted({int(x) for points in cut.values() for x, _ in points})
        axis.set_xticks(places, list(map(str, places)))
        axis.minorticks_off()

    return draw(
        name,
        [bars, curves] if cut else [bars],
        lambda theme: legend_lines({column: names.index(column) for column in cut}, theme),
        lambda axis, paint, theme: paint(axis, theme),
    )


def _by_dimension(section: Section) -> list[tuple[int, float]]:
    """Dimensions and nDCG@10, where the section says how many dimensions whole vectors have."""
    points = []
    for system, values in section.poolers.items():
        dimension = section.dimension if system == _FULL else int(system) if system.isdigit() else None
        value = values.get(_NDCG)
        if dimension is not None and value is not None:
            points.append((dimension, value))
    return sorted(points)


def _scores(name: str, measured: Mapping[str, Section]) -> ReportFigure:
    """Histograms of the scores of positives, hard negatives and random negatives, a panel for each model."""
    shown = {column: section.scores for column, section in measured.items() if section.scores is not None}
    kinds = {kind: _KINDS.get(kind, 3) for scores in shown.values() for kind in scores.counts}

    def paint(axis: Axes, column: str, theme: Theme) -> None:
        for kind, counts in shown[column].counts.items():
            shares = np.asarray(counts) / max(1, sum(counts))
            shade = colour(kinds[kind], theme)
            axis.stairs(shares, np.asarray(shown[column].edges), color=shade, linewidth=1.5, label=kind)
        style_axis(axis, column, "score", "share", theme)

    return draw(name, list(shown), lambda theme: legend_lines(kinds, theme), paint)
