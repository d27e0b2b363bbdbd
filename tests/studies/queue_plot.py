"""The plot of docs/results/queue.md: every run over the length of its queue, a colour for each guard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.lines import Line2D

from capt.pretrain.report.plots import colour, new_figure, style_axis, to_png
from tests.studies.queue_tables import Trial

PANELS = {
    "retrieval": "own corruption nearest (higher)",
    "loss": "MLM loss, held-out text (lower)",
    "sts_mean": "STS-B dev, mean pooling (higher)",
}


def plot_trials(trials: Sequence[Trial], out: Path) -> None:
    """A panel for each metric: over K / in-batch, a dot for each run, a line through the means of each guard's seeds.

    The line of a guard begins at the runs without a queue.
    """
    none = [trial for trial in trials if not trial.queue]
    guards = sorted({trial.arm for trial in trials if trial.queue})
    lengths = sorted({trial.ratio for trial in trials})
    figure, axes = new_figure(len(PANELS), 2, "light")
    for (field, title), axis in zip(PANELS.items(), axes, strict=True):
        for number, guard in enumerate(guards):
            means = []
            for place, ratio in enumerate(lengths):
                own = [trial for trial in trials if trial.arm == guard and trial.ratio == ratio] or none
                values = [getattr(trial, field) for trial in own]
                axis.plot([place] * len(values), values, "o", color=colour(number, "light"), markersize=3, alpha=0.5)
                means.append(sum(values) / len(values))
            axis.plot(range(len(lengths)), means, color=colour(number, "light"), linewidth=2)
        style_axis(axis, title, "queued rows / rows of a step", "", "light")
        axis.set_xticks(range(len(lengths)), [f"{ratio:g}" for ratio in lengths])
    handles = [
        Line2D([], [], color=colour(number, "light"), linewidth=2, label=guard) for number, guard in enumerate(guards)
    ]
    out.write_bytes(to_png(figure, handles, "light").png)
