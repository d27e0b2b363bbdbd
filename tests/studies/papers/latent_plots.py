"""Plots: perplexity by each bound, KL and MI over training (Figure 3), dropout (Figure 4), and codes (Table 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from capt.pretrain.latent.config import CODES
from capt.pretrain.report.document import ReportFigure
from capt.pretrain.report.plots import Theme, colour, count_steps, draw, legend_lines, style_axis
from capt.pretrain.report.runs import RunRecord
from tests.studies.papers.latent_table import ModelRow, cluster_label

SCATTER_STEPS = (5_000, 15_000, 30_000, 80_000)
"""The steps of the paper's scatter plots."""


def shown_steps(available: Iterable[int]) -> list[int]:
    """Choose, of the steps that have codes, the nearest to each of :data:`SCATTER_STEPS`."""
    steps = sorted(available)
    return sorted({min(steps, key=partial(_distance, wanted)) for wanted in SCATTER_STEPS}) if steps else []


def _distance(a: int, b: int) -> int:
    return abs(a - b)


_SOLID, _DASHED = (0, (1, 0)), (0, (4, 2))
_PERPLEXITIES = (
    ("ppl_dual", "dual, of all sentences: no bound", "x"),
    ("ppl_exact", "exact KL: upper bound; measures the encoder", "o"),
    ("ppl_best", "tightest bound of all proposals, with 2 standard errors", "D"),
)


def bounds_figure(rows: Sequence[ModelRow]) -> list[ReportFigure]:
    """Plot each row's perplexity by the dual, by the exact KL and by the tightest bound, on one logarithmic axis."""
    models = [row for row in rows if row.name != "LSTM language model"]
    shown = [row for row in models if any(row.get(name) for name, _, _ in _PERPLEXITIES)]
    if not shown:
        return []
    language_model = [row for row in rows if row.name == "LSTM language model" and row.get("ppl_rec")]

    def legend(theme: Theme) -> list[Line2D]:
        handles = [Line2D([], [], color=colour(i, theme), marker=mark, linestyle="", label=label)
                   for i, (_, label, mark) in enumerate(_PERPLEXITIES)]  # fmt: skip
        if language_model:
            handles.append(Line2D([], [], color=colour(3, theme), label="LSTM language model of the same size: exact"))
        return handles

    def paint(axis: Axes, rows: Sequence[ModelRow], theme: Theme) -> None:
        _paint_bounds(axis, rows, language_model, theme)

    return [draw("latent-bounds", [shown], legend, paint, extra_lines=len(shown) // 2)]


def plotted(row: ModelRow, name: str) -> float | None:
    """A row's perplexity; by the exact KL that of the sentences which were weighted, where these were fewer.

    Else the tightest bound would be right of a looser one that is of other sentences.
    """
    there = row.estimate(f"{name}_there")
    return there["value"] if there is not None else row.get(name)


def _paint_bounds(axis: Axes, rows: Sequence[ModelRow], language_model: Sequence[ModelRow], theme: Theme) -> None:
    # The first row is at the top.
    places = np.arange(len(rows))[::-1]
    for i, (name, _, mark) in enumerate(_PERPLEXITIES):
        values = [plotted(row, name) or np.nan for row in rows]
        errors = [2 * ((row.estimate(name) or {}).get("standard_error") or 0.0) for row in rows]
        axis.errorbar(values, places, xerr=errors if name == "ppl_best" else None, fmt=mark, color=colour(i, theme))
    for row, style in zip(language_model, ("-", "--", ":") * len(language_model), strict=False):
        value = row.get("ppl_best") or row.get("ppl_rec") or 0.0  # over the same sentences as the diamonds
        axis.axvline(value, color=colour(3, theme), linewidth=1.2, linestyle=style)
    style_axis(axis, "Perplexity, by convention", "perplexity (logarithmic)", "", theme)
    axis.set_xscale("log")
    axis.margins(x=0.1, y=0.1)
    low, high = axis.get_xlim()
    steps = (1, 2, 5) if high < 1_000 * low else (1,)  # labels that do not run into each other
    axis.xaxis.set_major_locator(LogLocator(subs=steps, numticks=12) if high > 10 * low else MaxNLocator(6))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(places, [row.label for row in rows])


def training_figure(rows: Sequence[ModelRow]) -> list[ReportFigure]:
    """Plot dual KL, exact KL and MI of each validation (Figure 3)."""
    panels = [("kl_dual", "KL, dual"), ("kl_exact", "KL, exact"), ("mi_dual", "MI, dual"), ("mi_batch", "MI, batch")]
    panels = [(key, name) for key, name in panels if any(row.run.series(key, validation=True)[0] for row in rows)]
    if not panels:
        return []

    styles = [_SOLID if i < 7 else _DASHED for i in range(len(rows))]  # there are seven colours

    def legend(theme: Theme) -> list[Line2D]:
        handles = legend_lines([row.label for row in rows], theme, 2.0)
        for handle, style in zip(handles, styles, strict=True):
            handle.set_linestyle(style)
        return handles

    def paint(axis: Axes, panel: tuple[str, str], theme: Theme) -> None:
        for i, row in enumerate(rows):
            steps, values = row.run.series(panel[0], validation=True)
            axis.plot(steps, values, color=colour(i, theme), linestyle=styles[i], marker=".", label=row.label)
        style_axis(axis, panel[1], "optimizer step", "nats", theme)
        count_steps(axis, max(row.run.last_step for row in rows))

    return [draw("latent-kl-mi", panels, legend, paint)]


def dropout_figure(rows: Sequence[ModelRow]) -> list[ReportFigure]:
    """Plot perplexity against the dropout of the encoder, with a line for each model and text (Figure 4)."""
    by_name: dict[str, list[ModelRow]] = {}
    for row in rows:
        by_name.setdefault(row.label, []).append(row)
    series = {name: group for name, group in by_name.items() if len({_dropout(row) for row in group}) > 1}
    if not series:
        return []

    def paint(axis: Axes, panel: tuple[str, str], theme: Theme) -> None:
        for i, (name, group) in enumerate(series.items()):
            points = sorted((_dropout(row), value) for row in group if (value := row.get(panel[0])) is not None)
            line = zip(*points, strict=True) if points else ((), ())
            axis.plot(*line, color=colour(i, theme), marker="o", label=name)
        style_axis(axis, panel[1], "dropout of the encoder's word vectors", "perplexity", theme)

    panels = [("ppl_dual", "PPL, dual"), ("ppl_exact", "PPL, exact")]
    return [draw("latent-dropout", panels, lambda theme: legend_lines(list(series), theme, 2.0), paint)]


def _dropout(row: ModelRow) -> float:
    return float(row.run.config["model.encoder_dropout"])


def scatter_figures(runs: Sequence[RunRecord]) -> list[ReportFigure]:
    """Plot the codes of every class nearest to 5K, 15K, 30K and 80K steps (Table 5), one picture per run."""
    figures = []
    for run in runs:
        files = {int(path.stem.removeprefix("step-")): path for path in sorted((run.folder / CODES).glob("step-*.npy"))}
        if files:
            label = f"{cluster_label(run.config)}, K = {run.config['data.clusters']}"
            panels = [(step, files[step]) for step in shown_steps(files)]
            figures.append(draw(f"codes-{run.folder.resolve().name}", panels, partial(_title, label), _paint_codes))
    return figures


def _title(label: str, theme: Theme) -> list[Line2D]:
    return [Line2D([], [], linestyle="", label=label)]


def _paint_codes(axis: Axes, panel: tuple[int, Path], theme: Theme) -> None:
    for number, points in enumerate(np.load(panel[1])):
        axis.scatter(points[:, 0], points[:, 1], s=2, color=_class_colour(number), linewidths=0)
    style_axis(axis, f"{panel[0]:,} steps", "z1", "z2", theme)
    axis.set_aspect("equal", "datalim")


def _class_colour(number: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20"](number * 2 % 20 + number // 10 % 2)  # the ten dark hues first, then their light ones
