"""The registry of tasks: a plain dict from ``task.type`` to the package that implements it.

A task's package has two modules: ``config`` (a ``JOB`` class, no torch) and ``task`` (a ``TASK`` class, which
satisfies :class:`pretrain.engine.task.Task`); it may have ``evaluate`` (:func:`task_module`, for ``capt evaluate``) and
``report`` (what it adds to ``capt report``). Other distributions add tasks through the entry-point group
``capt.tasks`` (name = the type, value = the package).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from pretrain.base.errors import ConfigError, did_you_mean

TASKS = {
    "capt_language": "pretrain.language",
    "glue": "finetune.glue",
    "latent": "pretrain.latent",
}


def task_packages() -> dict[str, str]:
    """All known tasks: the built-in ones and those of installed entry points."""
    return TASKS | _of_other_distributions()


@functools.cache
def _of_other_distributions() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group="capt.tasks")}


def _package(type_: str) -> str:
    if type_ in TASKS:  # without a search through every installed distribution, which takes as long as all the rest
        return TASKS[type_]
    packages = task_packages()
    if type_ not in packages:
        raise ConfigError(f"task.type: unknown task {type_!r}; {did_you_mean(type_, sorted(packages))}")
    return packages[type_]


def job_class(type_: str) -> Any:
    """The configuration class of a task (imports no torch). Raises ``ConfigError`` for an unknown type."""
    return importlib.import_module(f"{_package(type_)}.config").JOB


def task_module(type_: str, name: str) -> ModuleType | None:
    """The module ``name`` of a task's package, None where it has none. Raises ``ConfigError`` for an unknown type.

    ``evaluate`` has ``command(checkpoint, *, ...) -> dict``, whose keywords are the options of ``capt evaluate`` that
    mean something to the task, and ``as_text(result) -> str``.
    """
    path = f"{_package(type_)}.{name}"
    return importlib.import_module(path) if importlib.util.find_spec(path) else None


def task_class(type_: str) -> Any:
    """The task's implementation (imports torch)."""
    return importlib.import_module(f"{_package(type_)}.task").TASK
