"""What tasks add to a report: functions of the module ``report`` in a task's package, where it has one.

``run_sections(runs)`` gets the runs of a report (:class:`~pretrain.report.runs.RunRecord`), ``sections(sweeps)`` its
sweeps (:class:`~pretrain.report.sweeps.SweepRecord`). Both return a list of
:class:`~pretrain.report.document.ReportSection`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pretrain.base.errors import ConfigError
from pretrain.registry import task_module
from pretrain.report.document import ReportSection


def task_sections(types: Iterable[str], function: str, folders: Sequence[Any]) -> list[ReportSection]:
    """``function(folders)`` of each task of ``types`` that has one, in the order of their names.

    A run can be reported where its task is not installed: it then gets no sections of its own.
    """
    sections: list[ReportSection] = []
    for type_ in sorted(set(types)):
        try:
            module = task_module(type_, "report")
        except ConfigError:
            continue
        add = getattr(module, function, None)
        sections += add(folders) if add is not None else []
    return sections
