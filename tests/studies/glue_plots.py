"""The plots of docs/results/glue.md: dev metric against step, and the paired differences with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from capt.pretrain.report.plots import colour, count_steps, new_figure, style_axis, to_png
from tests.studies.glue_tables import Difference
from tests.studies.glue_trials import Point


def plot_curves(points: Sequence[Point], out: Path) -> None:
    """A panel for each task and a line for each arm: the mean over all its runs; the band is their smallest and largest
    mean of a pretraining seed.
    """
    tasks, arms = list(dict.fromkeys(p.task for p in points)), list(dict.fromkeys(p.arm for p in points))
    figure, axes = new_figure(len(tasks), len(arms), "light")
    for task, axis in zip(tasks, axes, strict=True):
        for number, arm in enumerate(arms):
            own = [point for point in points if (point.task, point.arm) == (task, arm)]
            steps = sorted({point.step for point in own})
            seeds = sorted({point.seed for point in own})
            means = np.array([[_mean(own, seed, step) for step in steps] for seed in seeds])
            shade = colour(number, "light")
            axis.plot(steps, means.mean(0), color=shade, marker="o", markersize=3)
            axis.fill_between(steps, means.min(0), means.max(0), color=shade, alpha=0.15, linewidth=0)
        style_axis(axis, task, "optimizer step", "dev metric", "light")
        count_steps(axis, max(point.step for point in points if point.task == task))
    handles = [Line2D([], [], color=colour(number, "light"), label=arm) for number, arm in enumerate(arms)]
    out.write_bytes(to_png(figure, handles, "light").png)


def plot_differences(differences: Sequence[Difference], out: Path) -> None:
    """A panel for each pair of arms: the difference on every task with its 95% intervals (thin: runs, seeds and
    examples; thick: examples alone).
    """
    shown = [each for each in differences if each.whole is not None]
    pairs = list(dict.fromkeys((each.first, each.second) for each in shown))
    figure, axes = new_figure(len(pairs), 2, "light")
    shade = colour(0, "light")
    for (first, second), axis in zip(pairs, axes, strict=True):
        own = [each for each in shown if (each.first, each.second) == (first, second)]
        for row, each in enumerate(own):
            for interval, width in ((each.whole, 1.2), (each.examples, 4.0)):
                if interval is not None:
                    axis.plot([interval.low, interval.high], [row, row], color=shade, linewidth=width)
            axis.plot([each.seeds.mean], [row], "o", color=colour(1, "light"), markersize=5)
        style_axis(axis, f"{first} - {second}", "points", "", "light")
        axis.axvline(0, color="0.4", linewidth=0.8)
        axis.set_yticks(range(len(own)), [each.task for each in own])
        axis.invert_yaxis()
    handles = [
        Line2D([], [], color=shade, linewidth=1.2, label="95%: runs, seeds and examples"),
        Line2D([], [], color=shade, linewidth=4.0, label="95%: examples alone"),
    ]
    out.write_bytes(to_png(figure, handles, "light").png)


def _mean(points: Sequence[Point], seed: int, step: int) -> float:
    return float(np.mean([point.value for point in points if (point.seed, point.step) == (seed, step)]))
