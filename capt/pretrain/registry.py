"""The registry of tasks: a plain dict from ``task.type`` to the package that implements it.

A task's package has two modules: ``config`` (a ``JOB`` class, no torch) and ``task`` (a ``TASK`` class, which
satisfies :class:`capt.pretrain.engine.task.Task`). It may have ``evaluate`` and ``export``, to which ``capt evaluate``
and ``capt convert`` hand its checkpoints (:mod:`capt.pretrain.commands`), and ``report``, which adds sections to ``capt
report`` (:mod:`capt.pretrain.report.runs`). Other distributions add tasks through the entry-point group ``capt.tasks``
(name = the type, value = the package), with the same commands.

Callbacks work alike: a plain dict from a key of ``run.callbacks`` to the class, and the entry-point group
``capt.callbacks`` (name = the key, value = ``module:Class``). So do launchers (`capt.launcher.backends`), sources of
text (`capt.pretrain.data.sources`), formats of tables (`capt.pretrain.data.formats`) and encoders
(`capt.pretrain.models.architecture`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, TypeVar

from capt.pretrain.base.errors import EXTRA_OF, ConfigError, did_you_mean, how_to_install, shown
from capt.pretrain.base.sensitive import has_secret

Row = TypeVar("Row")

TASKS = {
    "ace": "capt.pretrain.embeddings",
    "capt_language": "capt.pretrain.language",
    "capt_pairs": "capt.pretrain.pairs",
    "capt_vl": "capt.pretrain.vision_language",
    "glue": "capt.finetune.glue",
    "labels": "capt.finetune.labels",
    "latent": "capt.pretrain.latent",
    "rerank": "capt.finetune.rerank",
    "visual": "capt.finetune.visual",
}

IMPORTERS = {"hf": "capt_language"}
"""The value of ``capt convert --from`` -> the task whose module ``import_<value>`` makes a run of a foreign model."""

VECTORS_TASK = "ace"
"""The task that evaluates and converts a file of word vectors."""

FOREIGN_TASK = "capt_language"
"""The task that evaluates a Hugging Face folder, which says nothing of a task."""

FOREIGN_CLASSIFIER = "labels"
"""The task that predicts with a Hugging Face folder."""

CALLBACKS = {
    "mlflow": "capt.pretrain.engine.callbacks.trackers:MLflow",
    "prometheus": "capt.pretrain.engine.callbacks.trackers:Prometheus",
    "wandb": "capt.pretrain.engine.callbacks.trackers:WeightsAndBiases",
}

METRICS_PORT = 29600
"""The default port of ``prometheus``: the exporters of a host have 9100 to 9999, NVIDIA's for its GPUs 9400."""

RELIABILITY = {
    "stragglers": "capt.pretrain.reliability.stragglers:Stragglers",
    "spikes": "capt.pretrain.reliability.spikes:Spikes",
    "ledger": "capt.pretrain.reliability.sample_ledger:SampleLedger",
    "replicas": "capt.pretrain.reliability.replicas:Replicas",
    "uploads": "capt.pretrain.reliability.uploads:Uploads",
    "local": "capt.pretrain.reliability.local.checkpointer:LocalCheckpointer",
}
"""The fault tolerance of every job. The engine finds it here, because the classes import the engine."""


RETRIEVAL = "capt.pretrain.retrieval.validation:RetrievalValidation"
"""Class that measures ``validate.retrieval``. The engine finds it here, because the class imports the engine."""


TEACHER = "capt.pretrain.retrieval.teacher:open_teacher"
"""Function that opens ``distillation.vectors``. Jobs of pairs find it here, because what encodes texts imports them."""


def _package(type_: str) -> str:
    return look_up(type_, TASKS, "capt.tasks", "task.type: unknown task")


def look_up(name: str, built_in: Mapping[str, str], group: str, problem: str) -> str:
    """The path of ``name``: a built-in one, or one of an entry-point group. Raises ``ConfigError`` with ``problem``."""
    if name in built_in:  # without a search through every installed distribution, which takes as long as all the rest
        return built_in[name]
    known = {**built_in, **entry_point_values(group)}
    if name not in known:
        raise ConfigError(f"{problem} {shown(name)}; {did_you_mean(name, sorted(known))}")
    return known[name]


@functools.cache
def entry_point_values(group: str) -> dict[str, str]:
    """Return what installed distributions have registered in an entry-point group, by name."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load_entry(path: str, group: str, user: str, form: str = "MODULE:CLASS") -> Any:
    """Import what a value of an entry-point ``group`` names: an attribute of a module, or the module alone.

    Args:
        path: ``MODULE:CLASS`` or ``MODULE``.
        group: for the message.
        user: the key that names it, with its value, such as ``data.source hub``.
        form: what ``path`` must be.

    Raises:
        ConfigError: it cannot be imported, or is not of the ``form``.
    """
    module, colon, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if colon or form != "a module" else found
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{user}: the entry point {path!r} of {group} cannot be imported: {error}; it must be {form}"
        ) from error


def job_class(type_: str) -> Any:
    """The configuration class of a task (imports no torch). Raises ``ConfigError`` for an unknown type."""
    return _attribute_of_task(type_, "config", "JOB")


def task_module(type_: str, name: str) -> ModuleType | None:
    """The module ``name`` of a task's package; None where it has none.

    Raises:
        ConfigError: the type is unknown, or its package cannot be imported.
    """
    package = _package(type_)
    path = f"{package}.{name}"
    try:
        there = importlib.util.find_spec(path) is not None  # imports the package
    except ModuleNotFoundError as error:
        raise ConfigError(f"task.type {type_}: its package {package!r} cannot be imported: {error}") from error
    return importlib.import_module(path) if there else None


def task_class(type_: str) -> Any:
    """The task's implementation (imports torch)."""
    return _attribute_of_task(type_, "task", "TASK")


def _attribute_of_task(type_: str, module: str, name: str) -> Any:
    """``name`` of a module that every task has. Raises ``ConfigError`` where it has not, or as `task_module`."""
    found = task_module(type_, module)
    if found is None or not hasattr(found, name):
        raise ConfigError(f"task.type {type_}: its package {_package(type_)!r} has no {module}.{name}, as a task must")
    return getattr(found, name)


def check_callbacks(callbacks: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ``ConfigError`` for an unknown key of ``run.callbacks``, or a secret in it. Imports no callback."""
    for name, settings in callbacks.items():
        _callback_path(name)
        for key, value in settings.items():
            if value is not None and has_secret(str({key: value})):
                raise ConfigError(
                    f"run.callbacks.{name}.{key} looks like a secret, and configurations are written into run folders: "
                    f"use the environment variables or the login of {name}"
                )


def require_tracker(name: str) -> None:
    """Raise ``ConfigError`` where a key of ``run.callbacks`` needs a package that is not installed."""
    if name in CALLBACKS and name in EXTRA_OF and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"run.callbacks.{name}: the package {name} is not installed; {how_to_install(EXTRA_OF[name])}, "
            "or remove the key"
        )


def look_up_row(name: str, rows: Mapping[str, Row], group: str, key: str, kind: type[Row], also: str = "") -> Row:
    """Return the row called ``name`` of a table of this package, or of an entry-point ``group``.

    Raises ``ConfigError`` where there is none, or none of this ``kind``: a value of ``key``, or ``also``, is right.
    """
    if name in rows:
        return rows[name]
    others = entry_point_values(group)
    if name not in others:
        known = sorted([*rows, *others, *([also] if also else [])])
        raise ConfigError(f"{key}: unknown {key.split('.')[-1]} {shown(name)}; {did_you_mean(name, known)}")
    row = load_entry(others[name], group, f"{key} {name}", "MODULE:ROW")
    if not isinstance(row, kind):
        raise ConfigError(f"{key} {name}: {others[name]!r} of {group} is not a {kind.__name__}")
    return row


def callback_class(name: str) -> Any:
    """The class of a key of ``run.callbacks`` (imports torch).

    Raises:
        ConfigError: the key is unknown, or the entry point of that name leads to nothing that can be imported.
    """
    return load_entry(_callback_path(name), "capt.callbacks", f"run.callbacks.{name}")


def reliability_callback(name: str) -> Any:
    """Build a callback of `RELIABILITY` (imports torch)."""
    module, _, attribute = RELIABILITY[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()


def retrieval_validation(section: Any) -> Any:
    """Build what measures a section ``validate.retrieval`` (imports torch; collective). Raises ``DataError``."""
    module, _, attribute = RETRIEVAL.partition(":")
    return getattr(importlib.import_module(module), attribute)(section)


def teacher_vectors(section: Any, verifier: Any) -> Any:
    """Open the vectors that a section ``distillation`` names (collective). Raises ``ConfigError``, ``DataError``."""
    module, _, attribute = TEACHER.partition(":")
    return getattr(importlib.import_module(module), attribute)(section, verifier)


def _callback_path(name: str) -> str:
    return look_up(name, CALLBACKS, "capt.callbacks", "run.callbacks: unknown callback")
