"""The report of one run or of several: its sections, and the same numbers as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.report.compare import Comparison, MetricSummary, RunGroup, direction
from pretrain.report.document import ReportFigure, ReportSection, Table
from pretrain.report.runs import RunRecord

_BEST = "Best is the best validation point of each run, per metric"
_STD = "; ± is the standard deviation over the seeds (n - 1)"
_FLOOR = "The floor of loss/capt, and so of loss, follows the temperature: compare runs by the validation metrics."
_ARROWS = {1: "↑", -1: "↓", 0: ""}


def run_sections(
    comparison: Comparison, light: Mapping[str, bytes], dark: Mapping[str, bytes], added: Sequence[ReportSection] = ()
) -> list[ReportSection]:
    """The sections of a report on runs: the runs, their results, the tasks' own sections, curves, configurations."""
    configurations = [_differences_table(comparison), *(_config_table(run) for run in comparison.runs)]
    spread = _STD if any(len(group.runs) > 1 for group in comparison.groups) else ""
    validation = ReportSection("Validation", tables=[_results_table(comparison)], remarks=[f"{_BEST}{spread}."])
    curves = [ReportFigure(name, image, dark[name]) for name, image in light.items()]
    remarks = [_FLOOR] if "loss/capt" in comparison.keys(validation=False) else []
    return [
        ReportSection("", notes=_notes(comparison), tables=[_runs_table(comparison)]),
        *([validation] if comparison.keys(validation=True) else []),
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
    return {"folder": str(run.folder), "last_step": run.last_step, "status": run.status, "notes": run.notes}


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
        [group.label, str(run.folder), seed, str(run.last_step), str(run.status.get("state", "unknown"))]
        for group in comparison.groups
        for run, seed in zip(group.runs, group.seeds, strict=True)
    ]
    return Table(["configuration", "run", "seed", "last step", "state"], rows)


def _results_table(comparison: Comparison) -> Table:
    header = ["validation metric"]
    for group in comparison.groups:
        name = group.label.split(":")[0] if comparison.differing else ""
        header += [f"{name} final".strip(), f"{name} best (step)".strip()]
    rows = []
    for metric in comparison.keys(validation=True):
        cells = [f"{metric} {_ARROWS[direction(metric)]}".strip()]
        for group in comparison.groups:
            cells += _result_cells(group, metric)
        rows.append(cells)
    return Table(header, rows)


def _result_cells(group: RunGroup, metric: str) -> list[str]:
    final, best = group.final(metric), group.best(metric)
    if best is None:
        return [_summary_text(final), ""]
    low, high = min(best.steps), max(best.steps)
    return [_summary_text(final), f"{_summary_text(best)} ({low if low == high else f'{low} to {high}'})"]


def _summary_text(summary: MetricSummary | None) -> str:
    if summary is None:
        return ""
    if summary.std is None:
        return f"{summary.mean:.4g}"
    # as many decimals as two digits of the deviation need
    decimals = 4 if summary.std == 0 else max(0, 1 - math.floor(math.log10(summary.std)))
    return f"{summary.mean:.{decimals}f} ± {summary.std:.{decimals}f}"


def _differences_table(comparison: Comparison) -> Table:
    header = ["key", *(group.label.split(":")[0] for group in comparison.groups)]
    rows = [
        [key, *(str(group.runs[0].config.get(key, "unset")) for group in comparison.groups)]
        for key in comparison.differing
    ]
    return Table(header, rows)


def _config_table(run: RunRecord) -> Table:
    rows = [[key, str(value)] for key, value in run.config.items()]
    return Table(["key", "value"], rows, details=f"Configuration of {run.folder}")
