"""The part of ``capt report`` for ``visual`` runs and sweeps: Table 3 of the CAPT paper, and its Figure 3 (centre).

A row is an initial model: where several runs differ in the seed alone, the median over them. The figure shows the
accuracy on the validation set against the step of fine-tuning, for each initial model, and the table under it the mean
over the first 1,000 steps, in which the paper sees CAPT 5 to 10 points ahead on GQA (Luo et al. 2020, 5.3).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from capt.finetune.visual.config import TASKS
from capt.pretrain.base.errors import UserError
from capt.pretrain.config import flatten, load_mapping
from capt.pretrain.report.compare import is_not_compared
from capt.pretrain.report.document import ReportFigure, ReportSection, Table
from capt.pretrain.report.runs import RunRecord
from capt.pretrain.report.sweep_page import Curves, curve_figure, read_curves, sweep_names
from capt.pretrain.report.sweeps import SweepRecord
from capt.pretrain.vision_language.config import is_synthetic
from tests.studies.papers.vision_language import is_pretraining, pretraining_of

# What a report says of the model that a ``visual`` run started from, as far as it is still there.


SCRATCH = "scratch"
"""``model.init`` of a model with random weights."""


class Initial(NamedTuple):
    """A name for the initial model, and how it was pretrained in a few words (empty where that is not known).

    Models that differ in nothing but the seed of their pretraining have the same ``key``.
    """

    name: str
    pretraining: str
    key: str


def describe_initial(init: Any, source: Path) -> Initial:
    """Describe ``model.init`` of a run.

    Args:
        init: the value in the configuration.
        source: the folder of the run or sweep; relative paths that lead nowhere from here are tried from there.
    """
    if init is None or str(init) == SCRATCH:
        return Initial("no pretraining", "none", "")
    path = Path(str(init))
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = _config_of(run) or _config_of(path) or _config_of(source / path)
    if not config:
        return Initial(run.name, "", str(run))
    if config.get("task.type") == "visual":
        before = describe_initial(config.get("model.init"), run)
        same = without_seed({**config, "model.init": before.key})
        return Initial(run.name, f"{before.pretraining}, then {config.get('data.task')}".removeprefix(", "), same)
    return Initial(run.name, pretraining_of(config) if is_pretraining(config) else "", without_seed(config))


def without_seed(config: Mapping[str, Any]) -> str:
    """A configuration (flat keys) as text, without the keys that do not change a run's metrics and without the seed."""
    return json.dumps({key: value for key, value in sorted(config.items()) if not is_not_compared(key)}, default=str)


def common_name(names: Sequence[str]) -> str:
    """A name for models of several seeds: what their names begin with, such as ``capt`` of ``capt-seed1``, ..."""
    letters = takewhile(lambda column: len(set(column)) == 1, zip(*names, strict=False))
    shared = "".join(column[0] for column in letters).rstrip("0123456789").removesuffix("seed").rstrip("-_. ")
    return shared if len(set(names)) > 1 and shared else names[0]


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        return flatten(load_mapping(path, resolved=True)) if path.is_file() else {}
    except UserError:
        return {}


EARLY_STEPS = 1000
"""Steps of the close-up: where CAPT is said to fine-tune faster (Luo et al. 2020, 5.3 and Figure 3)."""

PUBLISHED: dict[str, tuple[float | None, ...]] = {
    "SOTA (no pretraining)": (70.63, 70.90, 55.8, 56.1, 54.80, 53.50),
    "ViLBERT": (70.55, 70.92, None, None, None, None),
    "VisualBERT": (70.80, 71.00, None, None, 67.40, 67.00),
    "VL-BERT": (71.79, 72.22, None, None, None, None),
    "LXMERT": (72.42, 72.54, 59.95, 60.33, 74.82, 74.41),
    "CAPT": (72.78, 73.03, 60.48, 60.93, 75.12, 75.13),
}
"""Table 3: VQA test-dev and test-std, GQA test-dev and test-std (by the servers), NLVR2 dev and test-P, in per cent."""

METRIC = "accuracy"
_DEV_ROWS = 6982
"""Examples of NLVR2's official dev set, the one set of Table 3 on which everybody can measure."""

_REMARKS = [
    "Published rows are those of Table 3 (single models; Luo et al. 2020). Ours are medians over the seeds, in per "
    "cent, each run at its best validation, on the validation files of the run: VQA by the official rule, GQA exact "
    "match on balanced questions, NLVR accuracy. Only NLVR2 dev compares with the paper; test-dev and test-std of VQA "
    "and GQA come from the servers, to which capt evaluate --predictions writes the file.",
    "Pretraining says how the initial model was trained: the paper names no question answering among its objectives, "
    "LXMERT's released model had it.",
]


@dataclass
class Cell:
    """The runs of one task from one initial model: the best accuracy of each, and its curve."""

    scores: list[float] = field(default_factory=list)
    others: list[Mapping[str, float]] = field(default_factory=list)
    curves: list[tuple[list[int], list[float]]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median over the seeds."""
        return statistics.median(self.scores)

    def other(self, name: str) -> float | None:
        """The median of another metric at the best validation; None where a run lacks it."""
        values = [metrics[name] for metrics in self.others if name in metrics]
        return statistics.median(values) if values and len(values) == len(self.others) else None


@dataclass
class Row:
    """The results of one initial model (in one sweep, which ``prefix`` names), by task; of several seeds together."""

    prefix: str
    pretraining: str
    names: list[str] = field(default_factory=list)
    cells: dict[str, Cell] = field(default_factory=dict)
    synthetic: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The name of the model, without the seed where there are several."""
        return self.prefix + common_name(self.names)


def run_sections(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """Write the table, and the curves of fine-tuning, of the ``visual`` runs among ``runs``."""
    rows: dict[str, Row] = {}
    for run in runs:
        task = run.config.get("data.task")
        steps, values = run.series(METRIC, validation=True)
        if run.config.get("task.type") != "visual" or task not in TASKS or not values:
            continue
        row = _row(rows, run.config, "", run.folder)
        _add(row, task, run.config, values, run, steps)
    return _sections(list(rows.values()), *_curves(list(rows.values())))


def sections(sweeps: Sequence[SweepRecord]) -> list[ReportSection]:
    """Write the table, and the curves of fine-tuning, of the best configuration of each study."""
    rows: dict[str, Row] = {}
    several = len(sweeps) > 1
    for name, sweep in zip(sweep_names(sweeps), sweeps, strict=True):
        for study in sweep.studies:
            task = study.config.get("data.task")
            if study.config.get("task.type") != "visual" or task not in TASKS or study.best is None:
                continue
            # A study has the configuration of one of its trials: the parameters of the best replace those.
            config = {**study.config, **study.best.params}
            row = _row(rows, config, f"{name}: " if several else "", sweep.folder)
            cell = row.cells.setdefault(task, Cell())
            done = [trial for trial in study.best.trials if trial.done]
            cell.scores += [trial.metrics.get(METRIC, trial.score or 0.0) for trial in done]
            cell.others += [trial.metrics for trial in done]
            if (curves := read_curves(study, study.best)) is not None:
                cell.curves += curves.seeds
            _mark(row, task, config)
    return _sections(list(rows.values()), *_curves(list(rows.values())))


def _row(rows: dict[str, Row], config: Mapping[str, Any], prefix: str, folder: Path) -> Row:
    initial = describe_initial(config.get("model.init"), folder)
    row = rows.setdefault(prefix + initial.key, Row(prefix, initial.pretraining))
    row.names.append(initial.name)
    return row


def _add(row: Row, task: str, config: Mapping[str, Any], values: list[float], run: RunRecord, steps: list[int]) -> None:
    cell = row.cells.setdefault(task, Cell())
    best = max(range(len(values)), key=values.__getitem__)
    at_best = next(line.figures for line in run.validation if line.step == steps[best])
    cell.scores.append(values[best])
    cell.others.append(at_best)
    cell.curves.append((steps, values))
    _mark(row, task, config)


def _mark(row: Row, task: str, config: Mapping[str, Any]) -> None:
    if is_synthetic(config):
        row.synthetic.add(task)


def _sections(rows: list[Row], figures: list[ReportFigure], early: list[Table]) -> list[ReportSection]:
    if not rows:
        return []
    data = {
        row.name: {
            "pretraining": row.pretraining,
            "synthetic": sorted(row.synthetic),
            **{task: {"median": cell.median, "scores": cell.scores} for task, cell in row.cells.items()},
        }
        for row in rows
    }
    synthetic = sorted({TASKS[task].name for row in rows for task in row.synthetic})
    notes = [f"synthetic data (microworld): {', '.join(synthetic)}"] if synthetic else []
    tables = [_table(rows), _spread(rows), *early]
    title = "Vision-language (CAPT, Table 3)"
    return [ReportSection(title, notes=notes, tables=tables, remarks=_REMARKS, figures=figures, data=data)]


def _table(rows: Sequence[Row]) -> Table:
    """The published rows, and ours; a column of our own validation sets for each task."""
    header = ["model", "pretraining", "VQA test-dev", "VQA test-std", "GQA test-dev", "GQA test-std"]
    header += ["NLVR2 dev", "NLVR2 test-P", *(f"{task.name}, validation" for task in TASKS.values())]
    lines = [
        [model, "published", *("" if value is None else f"{value:.2f}" for value in values), *[""] * len(TASKS)]
        for model, values in PUBLISHED.items()
    ]
    for row in rows:
        own = {task: _cell(row, task) for task in TASKS}
        nlvr2 = row.cells.get("nlvr2")
        # Only the whole dev set compares with the published column.
        official = nlvr2 is not None and nlvr2.other("validation_samples") == _DEV_ROWS
        dev = own["nlvr2"] if official else ""
        own["nlvr2"] = "" if official else own["nlvr2"]
        lines.append([row.name, row.pretraining, "", "", "", "", dev, "", *own.values()])
    return Table(header, lines)


def _cell(row: Row, task: str) -> str:
    cell = row.cells.get(task)
    if cell is None:
        return ""
    return f"{100 * cell.median:.2f}" + (" (synthetic)" if task in row.synthetic else "")


def _spread(rows: Sequence[Row]) -> Table:
    """All seeds, mean and standard deviation, and the consistency where the task has one."""
    lines = []
    for row in rows:
        for task, cell in row.cells.items():
            scores = cell.scores
            deviation = f"{100 * statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
            consistency = cell.other("consistency")
            lines.append([
                row.name, TASKS[task].name + (" (synthetic)" if task in row.synthetic else ""), str(len(scores)),
                f"{100 * cell.median:.2f}", f"{100 * statistics.fmean(scores):.2f}", deviation,
                ", ".join(f"{100 * score:.2f}" for score in scores),
                "" if consistency is None else f"{100 * consistency:.2f}",
            ])  # fmt: skip
    return Table(["model", "task", "seeds", "median", "mean", "sd", "each seed", "consistency"], lines)


def early_mean(curves: Curves) -> float:
    """Return the mean of the median curve over the validations of the first 1,000 steps; NaN without one."""
    values = [value for step, value in zip(*curves.median(), strict=True) if step <= EARLY_STEPS]
    return statistics.fmean(values) if values else math.nan


def _curves(rows: Sequence[Row]) -> tuple[list[ReportFigure], list[Table]]:
    curves: dict[str, Sequence[Curves | None]] = {}
    for task in TASKS:
        cells = [row.cells.get(task) for row in rows]
        several = [Curves(METRIC, cell.curves) if cell is not None and cell.curves else None for cell in cells]
        if any(several):
            curves[TASKS[task].name] = several
    if not curves:
        return [], []
    header = [f"accuracy, mean over the first {EARLY_STEPS:,} steps", *(row.name for row in rows)]
    lines = []
    for name, drawn in curves.items():
        means = [math.nan if one is None else early_mean(one) for one in drawn]
        lines.append([name, *("" if math.isnan(mean) else f"{100 * mean:.2f}" for mean in means)])
    names = [row.name for row in rows]
    figures = [curve_figure("finetuning-curves", names, curves)]
    every = [one for drawn in curves.values() for one in drawn if one]
    if max(one.last for one in every) > EARLY_STEPS and not all(math.isnan(early_mean(one)) for one in every):
        close = {name: drawn for name, drawn in curves.items() if any(one and early_mean(one) >= 0 for one in drawn)}
        figures.append(curve_figure("finetuning-curves-start", names, close, EARLY_STEPS))
    return figures, [Table(header, lines)] if len(rows) > 1 else []
