"""The report of one run or of several, with what ``capt evaluate`` has measured: its sections, and the same as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.retrieval import METRICS
from capt.pretrain.engine.evaluations import Section
from capt.pretrain.engine.judgement import direction, error_of, is_error
from capt.pretrain.report.compare import MOST_IN_LABEL, Comparison, MetricSummary, RunGroup
from capt.pretrain.report.document import ReportFigure, ReportSection, Table, number
from capt.pretrain.report.plots import Theme, colour, draw, legend_lines, style_axis
from capt.pretrain.report.runs import RunRecord

ARROWS = {1: "↑", -1: "↓", 0: ""}
"""By `direction`: whether more or less is better."""

_NDCG = METRICS[0]
_FULL, _BM25 = "full", "bm25"
_KINDS = {"positives": 2, "hard negatives": 1, "random negatives": 0}
"""Kinds of scores, and the number of the colour of each."""

Measured = dict[str, dict[str, Section]]
"""For each data set of retrieval what was measured on it, by run and checkpoint."""


def evaluation_sections(comparison: Comparison) -> list[ReportSection]:
    """The sections of what was evaluated; none where nothing was."""
    found = list(_measured(comparison))
    sets: Measured = {}
    for column, section in found:
        if any(_NDCG in figures for figures in section.systems.values()):
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
        for pooler, values in section.systems.items():
            figures.update({f"{name} ({pooler})": value for name, value in values.items()})
    tables = []
    for (name, _), of in columns.items():
        rows = list(dict.fromkeys(figure for figures in of.values() for figure in figures))
        cells = [
            # Without the pooler behind it, the name of a figure says whether more is better.
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
        tables.append(Table.of(
            {f"{name}: system": system, **{metric: _figure(values, metric) for metric in METRICS}}
            for system, values in systems.items()
        ))  # fmt: skip
        figures.append(_picture(f"retrieval-{name}", measured, systems))
        if any(section.scores is not None for section in measured.values()):
            figures.append(_scores(f"scores-{name}", measured))
    return ReportSection("Retrieval", tables=tables, figures=figures)


def _systems(measured: Mapping[str, Section]) -> dict[str, Mapping[str, float | None]]:
    """The figures of each model with whole vectors, of what else is its own (int8, reranked), and of BM25 once."""
    systems: dict[str, Mapping[str, float | None]] = {}
    for column, section in measured.items():
        for system, values in section.systems.items():
            if system == _FULL:
                systems[column] = values
            elif not system.isdigit():
                is_shared = system == _BM25 or len(measured) == 1
                systems[system if is_shared else f"{column}, {system}"] = values
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
        # Room to the right of the bars for their labels.
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
    for system, values in section.systems.items():
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


_BEST = "Best is the best validation point of each run, per metric"
_STD = "; ± is the standard deviation over the seeds (n - 1)"
_QUERIES = "; ± is the standard error over the held-out queries"
_FLOOR = "The floor of loss/capt, and so of loss, follows the temperature: compare runs by the validation metrics."
_TIME = (
    "Training time is the time of the steps, without validation and checkpoints. Parameters and hardware are those of "
    "the newest checkpoint."
)
_LONGEST = 1e11
"""Seconds that a duration can show."""


def run_sections(
    comparison: Comparison, curves: list[ReportFigure], added: Sequence[ReportSection] = ()
) -> list[ReportSection]:
    """The sections of a report on runs: the runs, their results, the tasks' own sections, curves, configurations."""
    configurations = [_differences_table(comparison), *(_config_table(run) for run in comparison.runs)]
    spread = _STD if any(len(group.runs) > 1 for group in comparison.groups) else ""
    if not spread and any(map(is_error, comparison.keys(validation=True))):
        spread = _QUERIES
    validation = ReportSection("Validation", tables=[_results_table(comparison)], remarks=[f"{_BEST}{spread}."])
    remarks = [_FLOOR] if "loss/capt" in comparison.keys(validation=False) else []
    return [
        ReportSection(
            "", notes=_notes(comparison), tables=[_runs_table(comparison), _judgements(comparison)], remarks=[_TIME]
        ),
        *([validation] if comparison.keys(validation=True) else []),
        *evaluation_sections(comparison),
        *_predictions(comparison),
        *added,
        ReportSection("Curves", remarks=remarks, figures=curves),
        ReportSection("Configuration", tables=configurations),
    ]


def run_json(comparison: Comparison) -> dict[str, Any]:
    """The unrounded numbers of the tables."""
    metrics = comparison.keys(validation=True)
    return {
        "differing_keys": comparison.differing,
        "groups": [
            {
                "label": group.label,
                "seeds": group.seeds,
                "runs": [_run_json(run) for run in group.runs],
                "validation": {
                    metric: {"final": _summary_json(group.final(metric)), "best": _summary_json(group.best(metric))}
                    for metric in metrics
                },
            }
            for group in comparison.groups
        ],
    }


def _run_json(run: RunRecord) -> dict[str, Any]:
    facts = run.checkpoint
    return {
        "folder": str(run.folder), "last_step": run.last_step, "status": run.status, "notes": run.notes,
        "tokens": run.tokens, "training_seconds": run.seconds,
        "parameters": facts.parameters if facts else None, "ranks": facts.world_size if facts else None,
        "provenance": facts.provenance if facts else {}, "judgement": asdict(run.judgement),
        "evaluations": {
            checkpoint: [section.model_dump() for section in sections]
            for checkpoint, sections in run.evaluations.items()
        },
    }  # fmt: skip


def _summary_json(summary: MetricSummary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    return {"mean": summary.mean, "std": summary.std, "values": summary.values, "steps": summary.steps}


def run_title(comparison: Comparison) -> str:
    """The title of the report."""
    runs = comparison.runs
    return f"Run {runs[0].folder.resolve().name}" if len(runs) == 1 else f"Comparison of {len(runs)} runs"


def _notes(comparison: Comparison) -> list[str]:
    notes = [f"{run.folder}: {note}" for run in comparison.runs for note in run.notes]
    ends = sorted({run.last_step for run in comparison.runs})
    if len(ends) > 1:
        notes.append(f"the runs end at different steps ({', '.join(map(str, ends))}): compare final values with care")
    return notes


def _runs_table(comparison: Comparison) -> Table:
    rows = [
        {
            "configuration": group.label,
            "run": str(run.folder),
            "seed": seed,
            "last step": str(run.last_step),
            "state": str(run.status.get("state", "unknown")),
            "tokens": number(run.tokens or None, 0),
            "training time": _duration(run.seconds),
            "parameters": number(run.checkpoint.parameters if run.checkpoint else None, 0),
            "hardware": run.checkpoint.hardware if run.checkpoint else "",
        }
        for group in comparison.groups
        for run, seed in zip(group.runs, group.seeds, strict=True)
    ]
    return Table.of(rows, always=5)


def _duration(seconds: float | None) -> str:
    return "" if seconds is None or seconds > _LONGEST else str(timedelta(seconds=round(seconds)))


def _judgements(comparison: Comparison) -> Table:
    rows = [[run.folder.resolve().name, run.judgement.verdict, run.judgement.reason] for run in comparison.runs]
    return Table(["run", "judgement", "by its records"], rows)


def _predictions(comparison: Comparison) -> list[ReportSection]:
    """Write the prediction of each run that has a plan, beside the median of its whole steps."""
    rows = []
    for run in comparison.runs:
        if run.plan is None:
            continue
        where = {"run": run.folder.resolve().name, "devices": f"{run.plan.ranks} x {run.plan.devices}"}
        for name, of in (("seconds_per_step", run.plan.seconds_per_step), ("mfu", run.plan.mfu)):
            try:
                values = run.of_whole_steps(name) if of is not None else []
            except ConfigError:  # the task is not installed here, so that nothing says how long the ramp is
                values = []
            if of is not None and values:
                seen = statistics.median(values)
                predicted = f"{of.predicted:.4g} ({of.least:.4g} to {of.most:.4g})"
                ratio = number(of.predicted / seen if seen else None, 2)
                figures = {"figure": name, "predicted": predicted, "measured": f"{seen:.4g}"}
                rows.append({**where, **figures, "predicted / measured": ratio})
    return [ReportSection("Predicted and measured", tables=[Table.of(rows)])] if rows else []


def _results_table(comparison: Comparison) -> Table:
    rows = []
    for metric in comparison.keys(validation=True):
        if is_error(metric) or comparison.is_repeated(metric):
            continue
        row = {"validation metric": f"{metric} {ARROWS[direction(metric)]}".strip()}
        for group in comparison.groups:
            name = group.label.split(":")[0] if comparison.differing else ""
            row[f"{name} final".strip()] = _summary_text(group.final(metric)) + _error_text(group, metric)
            row[f"{name} best (step)".strip()] = _best_text(group.best(metric))
        rows.append(row)
    return Table.of(rows)


def _error_text(group: RunGroup, metric: str) -> str:
    """Return the standard error of a metric of a single run, where it was logged; several runs have a deviation."""
    error = group.final(error_of(metric)) if len(group.runs) == 1 else None
    return "" if error is None else f" ± {error.mean:.2g}"


def _best_text(best: MetricSummary | None) -> str:
    if best is None:
        return ""
    low, high = min(best.steps), max(best.steps)
    return f"{_summary_text(best)} ({low if low == high else f'{low} to {high}'})"


def _summary_text(summary: MetricSummary | None) -> str:
    if summary is None:
        return ""
    if summary.std is None:
        return f"{summary.mean:.4g}"
    # the decimals that two digits of the deviation need
    decimals = 4 if summary.std == 0 else max(0, 1 - math.floor(math.log10(summary.std)))
    return f"{summary.mean:.{decimals}f} ± {summary.std:.{decimals}f}"


def _differences_table(comparison: Comparison) -> Table:
    configs = {group.label.split(":")[0]: group.runs[0].config for group in comparison.groups}
    rows = ({"key": key, **{name: str(config.get(key, "unset")) for name, config in configs.items()}}
            for key in comparison.differing)  # fmt: skip
    many = len(comparison.differing) > MOST_IN_LABEL
    return Table.of(rows, f"The {len(comparison.differing)} keys that differ" if many else None)


def _config_table(run: RunRecord) -> Table:
    rows = [[key, str(value)] for key, value in run.config.items()]
    return Table(["key", "value"], rows, details=f"Configuration of {run.folder}")
