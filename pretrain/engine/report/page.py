"""Write a comparison as an HTML page that needs nothing but itself, as Markdown, and as JSON."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from pretrain.engine.report.compare import Comparison, Group, Summary, direction
from pretrain.engine.report.runs import RunRecord

Table = tuple[list[str], list[list[str]]]
"""Header and rows, as text."""

_BEST = "Best is the best validation point of each run, per metric; "
_STD = "± is the standard deviation over the seeds (n - 1)."
_ARROWS = {1: "↑", -1: "↓", 0: ""}


def write_html(comparison: Comparison, light: Mapping[str, bytes], dark: Mapping[str, bytes], out: Path) -> Path:
    """The page: runs, results, curves in the reader's light or dark mode, configurations."""
    figures = "\n".join(
        f"<figure><picture><source media='(prefers-color-scheme: dark)' srcset='{_data_uri(dark[name])}'>"
        f"<img src='{_data_uri(image)}' alt='Curves: {escape(name)}'></picture></figure>"
        for name, image in light.items()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(comparison))
    template = Template((files("pretrain.engine.report") / "page.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(_title(comparison)),
        runs=_html_table(_runs_table(comparison)),
        notes=f"<ul class='notes'>{notes}</ul>" if notes else "",
        results=_html_table(_results_table(comparison)) + f"<p class='small'>{_BEST + _STD}</p>",
        figures=figures,
        differences=_html_details("Configuration keys that differ", _differences_table(comparison)),
        configs="".join(_html_details(f"Configuration of {run.folder}", _config_table(run)) for run in comparison.runs),
    )
    out.write_text(page, encoding="utf-8")
    return out


def write_markdown(comparison: Comparison, figures: Iterable[str], out: Path) -> None:
    """The same without styles: tables, and links to the PNG files beside it."""
    parts = [f"# {_title(comparison)}", _markdown_table(_runs_table(comparison))]
    notes = _notes(comparison)
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    parts += ["## Validation", _markdown_table(_results_table(comparison)), _BEST + _STD]
    if comparison.differing:
        parts += ["## Configuration keys that differ", _markdown_table(_differences_table(comparison))]
    parts += ["## Curves", *(f"![{name}]({name}.png)" for name in figures)]
    out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def write_json(comparison: Comparison, out: Path) -> None:
    """The numbers of the tables, unrounded."""
    metrics = comparison.keys(validation=True)
    value = {
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
    out.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def _run_json(run: RunRecord) -> dict[str, Any]:
    return {"folder": str(run.folder), "last_step": run.last_step, "status": run.status, "notes": run.notes}


def _summary_json(summary: Summary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    return {"mean": summary.mean, "std": summary.std, "values": summary.values, "steps": summary.steps}


def _title(comparison: Comparison) -> str:
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
    return ["configuration", "run", "seed", "last step", "state"], rows


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
    return header, rows


def _result_cells(group: Group, metric: str) -> list[str]:
    final, best = group.final(metric), group.best(metric)
    if best is None:
        return [_summary_text(final), ""]
    low, high = min(best.steps), max(best.steps)
    return [_summary_text(final), f"{_summary_text(best)} ({low if low == high else f'{low} to {high}'})"]


def _summary_text(summary: Summary | None) -> str:
    if summary is None:
        return ""
    if summary.std is None:
        return f"{summary.mean:.4g}"
    # as many decimals as two digits of the deviation need
    decimals = 4 if summary.std == 0 else max(0, 1 - math.floor(math.log10(summary.std)))
    return f"{summary.mean:.{decimals}f} ± {summary.std:.{decimals}f}"


def _differences_table(comparison: Comparison) -> Table:
    header = ["key", *(group.label.split(":")[0] for group in comparison.groups)]
    return header, [
        [key, *(str(group.runs[0].config.get(key, "unset")) for group in comparison.groups)]
        for key in comparison.differing
    ]


def _config_table(run: RunRecord) -> Table:
    return ["key", "value"], [[key, str(value)] for key, value in run.config.items()]


def _html_table(table: Table) -> str:
    header, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _html_details(summary: str, table: Table) -> str:
    return f"<details><summary>{escape(summary)}</summary>{_html_table(table)}</details>" if table[1] else ""


def _markdown_table(table: Table) -> str:
    header, rows = table
    lines: list[Sequence[str]] = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
