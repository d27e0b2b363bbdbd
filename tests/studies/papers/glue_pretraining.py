"""GLUE by pretraining: Figure 3 (left and right) of the CAPT paper, of a sweep that begins from the runs of another.

A row is a configuration of pretraining. Of each of its runs the best fine-tuning setting of a task counts, by the
median over the fine-tuning seeds; the row is the mean over the runs, which differ in the pretraining seed alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from capt.finetune.glue.tasks import GLUE
from capt.pretrain.base.errors import ConfigError, UserError
from capt.pretrain.report.compare import RunGroup, compare, ranked
from capt.pretrain.report.document import ReportFigure, ReportSection, Table
from capt.pretrain.report.plots import Theme, colour, draw, legend_lines, style_axis
from capt.pretrain.report.runs import RunRecord, read_run
from capt.pretrain.report.sweeps import Configuration, SweepRecord
from tests.studies.papers.runs import with_defaults

TITLE = "GLUE by pretraining (CAPT, Figure 3)"
QUEUE = "contrast.queue"
AVERAGE = "Avg"
INIT = "model.init"

_REMARKS = [
    "In per cent, on the dev sets. Of a pretraining run the best fine-tuning setting of each task counts, by the "
    "median over the fine-tuning seeds; a row is the mean of its pretraining runs ± their standard deviation. Avg is "
    "the mean of the tasks. The paper draws its Figure 3 and prints no value of it.",
]
_ONE_RUN = (
    "one pretraining run a row: a difference may be that of two runs of the same row; several seeds of the sweep of "
    "pretraining give an interval"
)


@dataclass(frozen=True)
class Pretrained:
    """A pretraining run and the setting of each task that counts of those that were fine-tuned from it."""

    run: RunRecord
    settings: dict[str, Configuration]

    @property
    def scores(self) -> dict[str, float]:
        """The score of each task."""
        return {task: setting.median for task, setting in self.settings.items()}

    def flagged(self, tasks: Sequence[str]) -> int:
        """The number of trials that predicted a constant, or were no better than one that does."""
        return sum(bool(t.done and t.flag) for task in tasks for t in self.settings[task].trials)


@dataclass(frozen=True)
class Row:
    """The runs of one configuration of pretraining: their scores by task (`AVERAGE` included), and the varied keys."""

    values: tuple[str, ...]
    scores: Mapping[str, Sequence[float]]

    def cell(self, task: str) -> str:
        """Mean ± standard deviation over the runs, in per cent."""
        scores = [100 * score for score in self.scores[task]]
        deviation = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        return f"{statistics.fmean(scores):.1f}{deviation}"


def begins_from_several(sweep: SweepRecord) -> bool:
    """Tell whether a sweep begins from several initial models, so that no row of Table 2 is one model."""
    return len({c.params[INIT] for study in sweep.studies for c in study.configurations if INIT in c.params}) > 1


def pretraining_sections(sweeps: Sequence[SweepRecord]) -> list[ReportSection]:
    """The table and the figure of the sweeps that begin from several runs of pretraining; none without one."""
    notes: list[str] = []
    found = [one for sweep in filter(begins_from_several, sweeps) for one in _pretrained(sweep, notes)]
    shared = {task for task in GLUE if found and all(task in one.scores for one in found)}
    tasks = [task for task in GLUE if task in shared]
    if not tasks:
        return [ReportSection(TITLE, notes=notes)] if notes else []
    comparison = compare([one.run for one in found])
    rows = [_row(group, comparison.differing, found, tasks) for group in comparison.groups]
    if any(len(row.scores[AVERAGE]) == 1 for row in rows):
        notes.append(_ONE_RUN)
    if flagged := sum(one.flagged(tasks) for one in found):
        notes.append(
            f"{flagged} of the trials that count predicted a constant, or were no better than one that does (below)"
        )
    header = [*comparison.differing, "runs", *(GLUE[task].folder for task in tasks), AVERAGE]
    table = Table(
        header,
        [[*row.values, str(len(row.scores[AVERAGE])), *(row.cell(task) for task in (*tasks, AVERAGE))] for row in rows],
    )
    data = {
        "rows": [
            {"pretraining": dict(zip(comparison.differing, row.values, strict=True)), **row.scores} for row in rows
        ]
    }
    figure = _figure(rows, comparison.differing, tasks)
    return [ReportSection(TITLE, notes=notes, tables=[table], remarks=_REMARKS, figures=[figure], data=data)]


def _pretrained(sweep: SweepRecord, notes: list[str]) -> list[Pretrained]:
    by_init: dict[str, dict[str, list[Configuration]]] = {}
    signs: dict[str, int] = {}
    for study in sweep.studies:
        task = study.config.get("data.task")
        if study.config.get("task.type") != "glue" or task not in GLUE or study.metric not in GLUE[task].metrics:
            continue
        signs[task] = study.sign
        for configuration in study.configurations:
            if INIT in configuration.params and configuration.scores:
                by_init.setdefault(str(configuration.params[INIT]), {}).setdefault(task, []).append(configuration)
    found = []
    for init, by_task in by_init.items():
        try:
            run = read_run(_run_of(Path(init)))
        except UserError as error:
            notes.append(f"{sweep.name}: {init} was left out, for how it was pretrained is not known: {error}")
            continue
        with suppress(ConfigError):  # of a task that is not installed here
            run = with_defaults(run)
        found.append(Pretrained(run, {task: _best(several, signs[task]) for task, several in by_task.items()}))
    return found


def _run_of(init: Path) -> Path:
    return init.parent.parent if init.parent.name == "checkpoints" else init


def _best(configurations: Sequence[Configuration], sign: int) -> Configuration:
    order = ranked({number: c.scores for number, c in enumerate(configurations)}, sign)
    return configurations[order[0]]


def _row(group: RunGroup, keys: Sequence[str], found: Sequence[Pretrained], tasks: Sequence[str]) -> Row:
    own = [one for one in found if one.run in group.runs]
    scores: dict[str, list[float]] = {task: [one.scores[task] for one in own] for task in tasks}
    scores[AVERAGE] = [statistics.fmean(one.scores[task] for task in tasks) for one in own]
    config = group.runs[0].config
    return Row(tuple("" if config.get(key) is None else str(config[key]) for key in keys), scores)


def _figure(rows: Sequence[Row], keys: Sequence[str], tasks: Sequence[str]) -> ReportFigure:
    """The average and each task against the size of the queue, or where that does not vary, a place for each row."""
    sizes = sorted({row.values[keys.index(QUEUE)] for row in rows}, key=int) if QUEUE in keys else []
    by_size = len(sizes) >= 3
    lines: dict[str, list[Row]] = {}
    for row in rows:
        parts = [f"{k}={v}" for k, v in zip(keys, row.values, strict=True) if v and not (by_size and k == QUEUE)]
        lines.setdefault(", ".join(parts) or "as in the base", []).append(row)
    names = [size if size != "0" else "none" for size in sizes] if by_size else [str(n + 1) for n in range(len(rows))]

    def place(row: Row) -> int:
        return sizes.index(row.values[keys.index(QUEUE)]) if by_size else rows.index(row)

    def paint(axis: Axes, task: str, theme: Theme) -> None:
        axis.set_xticks(range(len(names)), names)
        for number, (label, several) in enumerate(lines.items()):
            shade = colour(number, theme)
            points = sorted((place(row), [100 * score for score in row.scores[task]]) for row in several)
            for at, scores in points:
                axis.plot([at] * len(scores), scores, ".", color=shade, alpha=0.5, markersize=5)
            middle = [statistics.fmean(scores) for _, scores in points]
            axis.plot([at for at, _ in points], middle, color=shade, linewidth=1.6, marker="o", label=label)
        x = f"{QUEUE}: rows that are kept as negatives" if by_size else "pretraining, in the order of the table"
        style_axis(axis, AVERAGE if task == AVERAGE else GLUE[task].folder, x, "per cent", theme)

    labels = list(lines) if by_size else [f"{number}: {label}" for number, label in enumerate(lines, start=1)]
    return draw("glue-by-pretraining", [AVERAGE, *tasks], lambda theme: legend_lines(labels, theme), paint)
