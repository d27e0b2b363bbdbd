"""The plot of docs/results/language.md: every run of every variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.lines import Line2D

from capt.pretrain.report.plots import colour, new_figure, style_axis, to_png
from tests.studies.language_tables import Trial

PANELS = {
    "loss": "MLM loss, held-out books (lower)",
    "noise_mean": "own corruption nearest, mean pooling (higher)",
    "drift_mean": "drift under corruption (lower)",
    "sts_test_mean": "STS-B test, mean pooling (higher)",
}


def plot_trials(trials: Sequence[Trial], out: Path) -> None:
    """A panel for each metric, a row for each variant, a dot for each run, and a line at the mean of the runs.

    Random weights have no row in the panel of the loss, which would hide the differences of the others.
    """
    variants = list(dict.fromkeys(trial.variant for trial in trials))
    figure, axes = new_figure(len(PANELS), 2, "light")
    for number, ((field, title), axis) in enumerate(zip(PANELS.items(), axes, strict=True)):
        for row, variant in enumerate(variants):
            values = [getattr(trial, field) for trial in trials if trial.variant == variant]
            if variant == "none" and field == "loss":
                continue
            mean = sum(values) / len(values)
            axis.plot(values, [row] * len(values), "o", color=colour(0, "light"), markersize=4, alpha=0.6)
            axis.plot([mean, mean], [row - 0.3, row + 0.3], color=colour(1, "light"), linewidth=2)
        style_axis(axis, title, "", "", "light")
        axis.set_yticks(range(len(variants)), variants if number % 3 == 0 else [""] * len(variants))
        axis.invert_yaxis()
    handles = [
        Line2D([], [], color=colour(0, "light"), marker="o", linestyle="", label="a run"),
        Line2D([], [], color=colour(1, "light"), linewidth=2, label="mean of the seeds"),
    ]
    out.write_bytes(to_png(figure, handles, "light").png)
