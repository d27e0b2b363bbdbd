"""The curves of a report: figures with a panel per metric and a colour per configuration."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedFormatter, MaxNLocator

from capt.pretrain.engine.judgement import is_error
from capt.pretrain.report.compare import Comparison, RunGroup
from capt.pretrain.report.document import Drawing, ReportFigure
from capt.pretrain.report.runs import RunRecord

Theme = Literal["light", "dark"]
_P = TypeVar("_P")

_COLOURS = {
    # Okabe and Ito's palette: told apart with any colour vision; its black and yellow fit one background each
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    "dark": ("#56B4E9", "#E69F00", "#00C493", "#CC79A7", "#D55E00", "#F0E442", "#FFFFFF"),
}
_BACKGROUND = {"light": "#ffffff", "dark": "#16181d"}
_TEXT = {"light": "#24292f", "dark": "#d5d9e0"}
_GRID = {"light": "#d8dee4", "dark": "#353a44"}

_UNITS = {
    "loss": "nats",
    "loss/mlm": "nats per masked token",
    "loss/capt": "nats per pair",
    "loss/capt_fixed": "nats per pair",
    "loss/pairs": "nats per pair",
    "loss/rec": "nats per sentence",
    "loss/contrast": "nats",
    "accuracy/mlm": "share of masked tokens",
    "contrast/accuracy": "share of anchors",
    "contrast/margin": "cosine",
    "contrast/positive_probability": "probability",
    "contrast/effective_negatives": "negatives",
    "retrieval/to_corrupted": "share of queries",
    "retrieval/to_original": "share of queries",
    "alignment": "mean squared distance",
    "uniformity": "log mean exp(-2 distance²)",
    "first_direction": "share of the sum of squares",
    "temperature": "τ",
    "lr": "learning rate",
    "grad_norm": "L2 norm",
    "samples_per_second": "samples / s",
    "tokens_per_second": "tokens / s",
    "seconds_per_step": "s / step",
    "mfu": "share of peak FLOP/s",
    "own_time_ratio": "slowest rank / median",
    "cosine_gap": "cosine",
    "centred_gap": "cosine",
    "drift": "share of the distance between texts",
    "top1": "share of queries",
}
_COLUMNS = 3
_RATES = ("seconds_per_step", "mfu", "own_time_ratio")
_DASHES = (0, (4, 2))
HIDDEN = "_hidden"
"""The label of a curve that the pointer does not show."""
_MOST_POINTS = 40_000
"""Points that a page holds of a figure, at most."""
_SMOOTH_FROM = 40  # points; with fewer the raw curve is readable
_SCHEDULES = frozenset({"lr", "temperature"})  # free of noise: an average would only blunt their corners


def draw_curves(comparison: Comparison) -> list[ReportFigure]:
    """The figures of runs (``losses``, ``validation``, ...); those without curves are left out."""
    paint = partial(_panel, comparison)
    return [
        draw(name, keys, partial(_legend, comparison, keys), paint) for name, keys in figure_keys(comparison).items()
    ]


def figure_keys(comparison: Comparison) -> dict[str, list[str]]:
    """The curves of each figure. Four or more validation metrics with one prefix have a figure of their own."""
    training, validation = (
        [key for key in comparison.keys(validation=flag) if not _has_no_curve(key) and not comparison.is_repeated(key)]
        for flag in (False, True)
    )
    losses = sorted(key for key in {*training, *validation} if key.split("/")[0] == "loss")
    rates = [key for key in training if key.endswith("_per_second") or key in _RATES]
    figures = {
        "losses": losses,
        "optimisation": [key for key in training if key not in (*losses, *rates, *validation)],
        "throughput": rates,
    }
    for key in validation:
        if key not in losses:
            prefix = re.sub(r"[^\w.-]", "-", key.split("/")[0])
            family = sum(other.split("/")[0] == key.split("/")[0] for other in validation)
            figures.setdefault(f"validation-{prefix}" if family >= 4 else "validation", []).append(key)
    return {name: keys for name, keys in figures.items() if keys}


def _has_no_curve(key: str) -> bool:
    """Return whether a figure is a constant, a yes or no, or the error of another one."""
    return key.split("/")[0] in ("baseline", "degenerate") or is_error(key)


def smooth(values: Sequence[float]) -> list[float]:
    """A centred moving average over a twentieth of the curve, shorter at both ends, so that it does not lag.

    Values that are not finite are ignored.
    """
    points, reach = np.asarray(values, dtype=float), len(values) // 40
    finite = np.isfinite(points)
    sums, counts = (np.append(0.0, np.cumsum(each)) for each in (np.where(finite, points, 0.0), finite))
    middle = np.arange(len(points))
    low, high = np.maximum(0, middle - reach), np.minimum(len(points), middle + reach + 1)
    with np.errstate(invalid="ignore"):  # a stretch without a finite value is NaN
        means: list[float] = ((sums[high] - sums[low]) / (counts[high] - counts[low])).tolist()
    return means


def draw(
    name: str,
    panels: Sequence[_P],
    legend: Callable[[Theme], Sequence[Line2D]],
    paint: Callable[[Axes, _P, Theme], None],
    extra_lines: int = 0,
) -> ReportFigure:
    """Draw a figure in both themes.

    Args:
        name: the name of the figure.
        panels: what each panel shows.
        legend: makes the lines of the legend, which is above the panels.
        paint: draws one panel into its axis.
        extra_lines: by how many lines of the legend the figure is higher.
    """

    def drawing(theme: Theme) -> Drawing:
        handles = legend(theme)
        figure, axes = new_figure(len(panels), len(handles) + extra_lines, theme)
        for axis, panel in zip(axes, panels, strict=True):
            paint(axis, panel, theme)
        return to_png(figure, handles, theme)

    return ReportFigure(name, drawing("light"), drawing("dark"))


def legend_lines(names: Sequence[str] | Mapping[str, int], theme: Theme, width: float = 3.0) -> list[Line2D]:
    """A line of the legend for each name, in the colour of its number: its place, or what ``names`` says."""
    numbers = names.items() if isinstance(names, Mapping) else ((name, i) for i, name in enumerate(names))
    return [Line2D([], [], color=colour(i, theme), linewidth=width, label=name) for name, i in numbers]


def new_figure(panels: int, legend_lines: int, theme: Theme) -> tuple[Figure, list[Axes]]:
    """Make an empty figure with ``panels`` axes in rows of three, and room for a legend."""
    columns = min(_COLUMNS, panels)
    rows = math.ceil(panels / columns)
    size = (max(4.3 * columns, 8.6), 2.8 * rows + 0.25 * legend_lines)
    figure = Figure(figsize=size, dpi=110, facecolor=_BACKGROUND[theme], layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes[:panels]


def to_png(figure: Figure, handles: Sequence[Line2D], theme: Theme) -> Drawing:
    """Draw the legend and return the figure as a PNG image with the points of its curves."""
    figure.legend(handles=handles, loc="outside upper left", frameon=False, labelcolor=_TEXT[theme], fontsize=9)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font lacks is drawn as a box
        figure.savefig(buffer, format="png")
    axes = [axis for axis in figure.axes if axis.get_visible()]
    most = _MOST_POINTS // max(1, sum(len(axis.lines) for axis in axes))
    return Drawing(buffer.getvalue(), [_points_of(axis, most) for axis in axes])


def _points_of(axis: Axes, most: int) -> dict[str, Any]:
    """Describe a panel that has been drawn: its place, its axes, and at most ``most`` points of each of its curves."""
    box, ticks = axis.get_position(), axis.xaxis.get_major_formatter()
    # Places with names instead of numbers.
    names = dict(zip(axis.get_xticks(), ticks.seq, strict=False)) if isinstance(ticks, FixedFormatter) else {}
    lines = []
    for line in axis.lines:
        name = str(line.get_label())
        x, y = (np.asarray(values, dtype=float) for values in line.get_data())
        finite = np.isfinite(x) & np.isfinite(y)
        # A line across the whole panel has one coordinate in axis units, and markers alone are no curve either.
        is_curve = (
            all(line.get_transform().contains_branch_seperately(axis.transData)) and line.get_linestyle() != "None"
        )
        if name == HIDDEN or not is_curve or not finite.any():
            continue
        step = math.ceil(finite.sum() / max(most, 20))
        # Six digits are finer than a pixel.
        points = [
            [float(f"{a:.6g}"), float(f"{b:.6g}")] for a, b in zip(x[finite][::step], y[finite][::step], strict=True)
        ]
        # Matplotlib itself names a line without a label, with _ at the front.
        lines.append({
            "name": "" if name.startswith("_") else name, "colour": to_hex(line.get_color()), "points": points,
        })  # fmt: skip
    return {
        "box": [round(float(value), 5) for value in (box.x0, box.y0, box.x1, box.y1)],
        "x": [*map(float, axis.get_xlim()), axis.get_xscale() == "log"],
        "y": [*map(float, axis.get_ylim()), axis.get_yscale() == "log"],
        "title": [axis.get_xlabel(), axis.get_title(loc="left")],
        "names": {f"{float(place):g}": str(name) for place, name in names.items() if not _is_number(str(name))},
        "lines": lines,
    }


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def style_axis(axis: Axes, title: str, x: str, y: str, theme: Theme) -> None:
    """Set title, labels, grid and colours of a panel."""
    text_colour = _TEXT[theme]
    axis.set_facecolor(_BACKGROUND[theme])
    axis.set_title(title, color=text_colour, fontsize=10, loc="left", fontweight="bold")
    axis.set_xlabel(x, color=text_colour, fontsize=9)
    axis.set_ylabel(y, color=text_colour, fontsize=9)
    axis.grid(color=_GRID[theme], linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_GRID[theme])
    axis.tick_params(which="both", colors=text_colour, labelsize=8, length=0)


def count_steps(axis: Axes, last: int) -> None:
    """Let the x axis count optimizer steps from 0 to ``last``."""
    axis.set_xlim(0, 1.02 * max(last, 1))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if last >= 10_000:
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def _panel(comparison: Comparison, axis: Axes, key: str, theme: Theme) -> None:
    # The more runs lie over each other, the fainter each is.
    faint = 0.4 / math.sqrt(len(comparison.runs))
    for number, group in enumerate(comparison.groups):
        for run, seed in zip(group.runs, group.seeds, strict=True):
            several = f" seed {seed}" if len(group.runs) > 1 else ""
            name = f"{group.label.split(':')[0]}{several}: " if len(comparison.runs) > 1 else ""
            _curve(axis, run, key, colour(number, theme), faint, name)
    style_axis(axis, key, "optimizer step", _UNITS.get(key, _UNITS.get(key.split("/")[-1], "value")), theme)
    count_steps(axis, max(run.last_step for run in comparison.runs))
    if axis.dataLim.ymax >= 10_000:
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))


def _curve(axis: Axes, run: RunRecord, key: str, shade: str, faint: float, name: str) -> None:
    steps, values = run.series(key, validation=False)
    label = f"{name}training"
    if _is_smoothed(key, values):
        axis.plot(steps, values, color=shade, linewidth=0.7, alpha=faint, label=HIDDEN)
        axis.plot(steps, smooth(values), color=shade, linewidth=1.6, label=f"{label}, average")
    elif values:
        axis.plot(steps, values, color=shade, linewidth=1.6, marker="." if len(values) == 1 else None, label=label)
    steps, values = run.series(key, validation=True)
    if values:
        label = f"{name}validation"
        axis.plot(steps, values, color=shade, linewidth=1.4, linestyle=_DASHES, marker="o", markersize=3.5, label=label)


def _legend(comparison: Comparison, keys: Sequence[str], theme: Theme) -> list[Line2D]:
    """The lines of the legend: one per configuration, if there are several, and one per kind of curve."""
    several = len(comparison.runs) > 1  # each group has a run
    # The kinds of curves are explained in the colour of the curves, where all have the same.
    text_colour = _TEXT[theme] if several else colour(0, theme)
    handles = legend_lines([_legend_name(group) for group in comparison.groups], theme) if several else []
    training = [(key, run.series(key, validation=False)[1]) for run in comparison.runs for key in keys]
    if any(_is_smoothed(key, values) for key, values in training):
        handles.append(Line2D([], [], color=text_colour, linewidth=0.7, alpha=0.5, label="training, as logged"))
        handles.append(Line2D([], [], color=text_colour, linewidth=1.6, label="training, moving average"))
    elif any(values for _, values in training):
        handles.append(Line2D([], [], color=text_colour, linewidth=1.6, label="training"))
    if any(run.series(key, validation=True)[1] for run in comparison.runs for key in keys):
        line = Line2D([], [], color=text_colour, linewidth=1.4, linestyle=_DASHES, marker="o", markersize=3.5)
        line.set_label("validation")
        handles.append(line)
    return handles


def _is_smoothed(key: str, values: Sequence[float]) -> bool:
    return len(values) >= _SMOOTH_FROM and key not in _SCHEDULES


def _legend_name(group: RunGroup) -> str:
    runs = f" ({len(group.runs)} runs)" if len(group.runs) > 1 else ""
    return textwrap.shorten(group.label, 110, placeholder=" ...") + runs


def colour(number: int, theme: Theme) -> str:
    """The colour of the configuration or sweep with that number."""
    return _COLOURS[theme][number % len(_COLOURS[theme])]
