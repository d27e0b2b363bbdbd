"""Write the report of one run, of several that are compared, or of sweeps: an HTML page, curves and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import finite, write_text
from capt.pretrain.report.compare import compare
from capt.pretrain.report.document import ReportSection, write_figures, write_html, write_markdown
from capt.pretrain.report.page import run_json, run_sections, run_title
from capt.pretrain.report.plots import draw_curves
from capt.pretrain.report.runs import NothingLoggedError, read_run, report_module, task_sections
from capt.pretrain.report.sweep_page import sweep_json, sweep_sections, sweep_title
from capt.pretrain.report.sweeps import is_sweep, read_sweep

_R = TypeVar("_R")


def report(folders: Sequence[Path], out: Path, module_of: Callable[[str], ModuleType | None] = report_module) -> Path:
    """Write ``report.html``, ``report.md``, ``report.json`` and the curves (PNG) of runs or of sweeps into ``out``.

    One run shows every curve it logged. Several are overlaid, named by the configuration keys in which they differ, and
    runs that differ only in ``run.seed`` are summed up as mean and standard deviation. A sweep shows for each study the
    configuration with the best median over the seeds, all seeds, hyperparameters and learning curves; several are
    compared. Runs and sweeps that have logged nothing are named and left out, unless there is no other. The module
    that ``module_of`` returns for a task may add sections. The page holds its images and styles and needs no network.
    Returns its path.

    Raises:
        DataError: no folder is given, runs are mixed with sweeps, or a folder lacks its files or holds nothing usable.
    """
    if not folders:
        raise DataError("no run is given; name at least one run folder")
    sweeps = [folder for folder in folders if is_sweep(folder)]
    if sweeps and len(sweeps) < len(folders):
        run = next(folder for folder in folders if folder not in sweeps)
        raise DataError(f"{sweeps[0]} is a sweep and {run} is not; give runs or sweeps")
    left_out: list[str] = []
    if sweeps:
        read = _with_rows(read_sweep, sweeps, left_out)
        types = {str(study.config.get("task.type")) for sweep in read for study in sweep.studies}
        added = task_sections(types, "sections", read, module_of)
        name, sections = sweep_title(read), sweep_sections(read, added)
        data = sweep_json(read, sections)
    else:
        comparison = compare(_with_rows(read_run, folders, left_out))
        types = {str(run.config.get("task.type")) for run in comparison.runs}
        added = task_sections(types, "run_sections", comparison.runs, module_of)
        name, sections = run_title(comparison), run_sections(comparison, draw_curves(comparison), added)
        data = run_json(comparison) | {section.title: section.data for section in added if section.data}
    if left_out:
        sections.insert(0, ReportSection("", notes=left_out))
        data["left_out"] = left_out
    write_text(out / "report.json", json.dumps(finite(data), indent=2, default=str, allow_nan=False) + "\n")
    write_figures(sections, out)
    write_markdown(name, sections, out / "report.md")
    return write_html(name, sections, out / "report.html")


def _with_rows(read: Callable[[Path], _R], folders: Sequence[Path], left_out: list[str]) -> list[_R]:
    """Read the folders; those that have logged nothing are added to ``left_out``. Raises where all are so."""
    found: list[_R] = []
    for folder in folders:
        try:
            found.append(read(folder))
        except NothingLoggedError as error:
            if len(left_out) == len(folders) - 1:
                raise
            left_out.append(f"left out: {error}")
    return found
