"""The tables and the plot of docs/results/distillation.md: figures, shares of the teacher's, and paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tests.studies.pretexts_tables import DECIDING, SETS, rule
from tests.studies.seeds import mean_interval, seeds_compared, spread
from tests.studies.support import table

TEACHER = ("teacher", "none")
FASTER, QUANTIZED = "pairs at 3e-4", "pairs in three precisions"
COMPARED = (("cosine", "pairs"), ("cosine", FASTER), ("listwise", "pairs"), ("cosine", "listwise"))
SYSTEMS = ("float", "int8", "int8 x4", "binary", "binary x4")
"""Vectors as they are searched; x4: the first 400 documents scored again by queries in float."""


class Trial(NamedTuple):
    """A measurement, in figures x 100; ``asymmetric``: Cranfield with documents by the teacher."""

    student: str
    loss: str
    seed: int
    stsb: float
    qnli: float
    cranfield: float
    asymmetric: float | None = None
    mrpc: float | None = None
    steps: int = 0
    cosine: float | None = None
    p5: float | None = None
    qnli_int8: float | None = None
    qnli_int8_x4: float | None = None
    qnli_binary: float | None = None
    qnli_binary_x4: float | None = None
    cranfield_int8: float | None = None
    cranfield_int8_x4: float | None = None
    cranfield_binary: float | None = None
    cranfield_binary_x4: float | None = None


def write_tables(trials: Sequence[Trial], speed: Mapping[str, float], path: Path) -> None:
    """Write the tables of ``trials`` and of texts a second as Markdown."""
    parts = [_figures(trials, speed), _shares(trials), _differences(trials)]
    parts += [_quantized(trials, name) for name in ("cranfield", "qnli")]
    parts += [_gained(trials)]
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _figures(trials: Sequence[Trial], speed: Mapping[str, float]) -> str:
    sets, rows = _sets(trials), []
    for arm in _arms(trials):
        own = [trial for trial in trials if trial[:2] == arm]
        figures = [spread([getattr(trial, name) for trial in own]) for name in sets]
        more = [
            [value for trial in own if (value := getattr(trial, name)) is not None] for name in ("asymmetric", "cosine")
        ]
        rate = f"{speed[arm[0]]:.0f}" if arm[0] in speed else ""
        rows.append([
            ", ".join(arm), str(len(own)), *figures, spread(more[0]) if more[0] else "",
            spread(more[1], digits=3) if more[1] else "", rate,
        ])  # fmt: skip
    heads = ["student, loss", "seeds", *(SETS[name] for name in sets), "Cranfield, documents by the teacher"]
    return table([*heads, "cosine to the teacher", "texts a second"], rows)


def _shares(trials: Sequence[Trial]) -> str:
    """The share of the teacher's figure that each arm has, in the mean over the seeds with a t interval."""
    own = [trial for trial in trials if trial[:2] == TEACHER]
    if not own:
        return ""
    sets, rows = _sets(trials), []
    for arm in _arms(trials):
        cells = []
        for name in sets:
            top = getattr(own[0], name)
            values = [100 * getattr(trial, name) / top for trial in trials if trial[:2] == arm]
            cells.append(mean_interval(values, sign=""))
        rows.append([", ".join(arm), *cells])
    return table(["share of the teacher, %", *(SETS[name] for name in sets)], rows)


def _differences(trials: Sequence[Trial]) -> str:
    """Mean, t interval over the seeds and seeds above 0 of each loss against pairs and against each other."""
    sets, rows = _sets(trials), []
    students = dict.fromkeys(trial.student for trial in trials if trial.loss == "pairs")
    for student in students:
        for first, second in COMPARED:
            cells, by_set = [], []
            for name in sets:
                a, b = (_by_seed(trials, (student, loss), name) for loss in (first, second))
                differences = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
                if not differences:
                    break
                if name in DECIDING:
                    by_set.append(differences)
                cells.append(seeds_compared(differences))
            else:
                rows.append([f"{student}: {first} - {second}", *cells, rule(by_set) if len(by_set[0]) > 1 else ""])
    return table(["difference", *(SETS[name] for name in sets), "by the rule"], rows)


def _quantized(trials: Sequence[Trial], name: str) -> str:
    """Figures of a set in float, int8 and bits, of each arm that has them."""
    rows = []
    for arm in _arms(trials):
        own = [trial for trial in trials if trial[:2] == arm and getattr(trial, f"{name}_int8") is not None]
        if own:
            cells = [spread([getattr(trial, column) for trial in own]) for column in _columns(name)]
            rows.append([", ".join(arm), str(len(own)), *cells])
    return table([f"{SETS[name]}: student, loss", "seeds", *SYSTEMS], rows)


def _gained(trials: Sequence[Trial]) -> str:
    """Mean, t interval over the seeds and seeds above 0 of what a loss in several precisions gains in each."""
    rows = []
    for student, loss in _arms(trials):
        if loss != QUANTIZED:
            continue
        for name in ("cranfield", "qnli"):
            cells = []
            for column in _columns(name):
                a, b = (_by_seed(trials, (student, each), column) for each in (loss, "pairs"))
                differences = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
                cells.append(seeds_compared(differences) if differences else "")
            rows.append([f"{SETS[name]}: {loss} - pairs", *cells])
    return table(["difference", *SYSTEMS], rows)


def _columns(name: str) -> list[str]:
    return [name, *(f"{name}_{system.replace(' ', '_')}" for system in SYSTEMS[1:])]


def _arms(trials: Sequence[Trial]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((trial.student, trial.loss) for trial in trials))


def _sets(trials: Sequence[Trial]) -> list[str]:
    return [name for name in SETS if any(getattr(trial, name) is not None for trial in trials)]


def _by_seed(trials: Sequence[Trial], arm: tuple[str, str], name: str) -> dict[int, float]:
    values = {trial.seed: getattr(trial, name) for trial in trials if trial[:2] == arm}
    return {seed: value for seed, value in values.items() if value is not None}


def _size(student: str) -> str:
    """The size of a student, which several have."""
    if student == TEACHER[0]:
        return "teacher, 6 layers"
    return f"{len(student.split()) - 1} layers" if student.startswith("layers ") else student


def plot_speed(trials: Sequence[Trial], speed: Mapping[str, float], out: Path) -> None:
    """A panel for each set: the figure of each trial over its texts a second, a colour for each loss."""
    from matplotlib.lines import Line2D

    from capt.pretrain.report.plots import colour, new_figure, style_axis, to_png

    losses = list(dict.fromkeys(trial.loss for trial in trials))
    figure, axes = new_figure(len(DECIDING), 2, "light")
    for name, axis in zip(DECIDING, axes, strict=True):
        for number, loss in enumerate(losses):
            own = [trial for trial in trials if trial.loss == loss and trial.student in speed]
            places, values = [speed[trial.student] for trial in own], [getattr(trial, name) for trial in own]
            axis.plot(places, values, "o", color=colour(number, "light"), markersize=4, alpha=0.7)
            for student in dict.fromkeys(trial.student for trial in own if trial.loss == "cosine"):
                place = speed[student], fmean(getattr(trial, name) for trial in own if trial.student == student)
                axis.annotate(student.removeprefix("layers "), place, (6, -3), textcoords="offset points", fontsize=8)
        sizes: dict[str, list[float]] = {}
        for student in {trial.student for trial in trials} & speed.keys():
            sizes.setdefault(_size(student), []).append(speed[student])
        rates = {size: fmean(values) for size, values in sizes.items()}
        axis.set_xscale("log")
        style_axis(axis, SETS[name], "texts a second, one core", "", "light")
        axis.set_xticks([*rates.values()], [f"{size}\n{rate:,.0f}" for size, rate in rates.items()])
        axis.minorticks_off()
    handles = [
        Line2D([], [], color=colour(number, "light"), marker="o", linestyle="", label=loss)
        for number, loss in enumerate(losses)
    ]
    out.write_bytes(to_png(figure, handles, "light").png)
