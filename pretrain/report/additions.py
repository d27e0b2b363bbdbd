"""What tasks add to a report: functions of the module ``report`` in a task's package, where it has one.

``run_sections(runs)`` gets the runs of a report, ``sections(sweeps)`` its sweeps; both return sections.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

from pretrain.registry import task_packages
from pretrain.report.document import ReportSection


def task_sections(types: Iterable[str], function: str, found: Sequence[Any]) -> list[ReportSection]:
    """``function(found)`` of each task of ``types`` that has one, in the order of their names."""
    wanted = set(types)
    sections: list[ReportSection] = []
    for type_, package in sorted(task_packages().items()):
        if type_ in wanted and importlib.util.find_spec(f"{package}.report"):
            add = getattr(importlib.import_module(f"{package}.report"), function, None)
            sections += add(found) if add is not None else []
    return sections
