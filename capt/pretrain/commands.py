"""The commands of a task: modules of its package, found by their names, to which ``capt`` hands a checkpoint.

``evaluate`` has ``command(checkpoint, *, ...) -> dict`` and ``as_text(result) -> str``; ``export`` has ``TARGETS``, the
values of ``capt convert --to`` (or ``targets(checkpoint)``, where they depend on it), and ``command(checkpoint, out,
*, to, overwrite, about, ...) -> Path``; where ``out`` is not a folder, also ``require_free(out, *, overwrite)``,
which refuses what cannot be replaced. ``predict`` has ``command(model, file, out, *, progress, ...) -> dict``, which
all ranks call (`capt.finetune.new_rows`). ``checkpoint`` and ``model`` are a checkpoint or a run (its best checkpoint,
else its newest), ``out`` is new or empty unless ``overwrite``, ``about`` is for the model card, and ``progress`` gets
what is done and what there is. The other keywords of ``command`` are the options that have a meaning for
the task: those of the command line under the same names, and any other of ``evaluate`` and ``export`` by ``--option
NAME=VALUE``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from capt.pretrain.base.errors import CheckpointError, ConfigError, did_you_mean
from capt.pretrain.base.records import first_fault
from capt.pretrain.config.reader import NotYamlError, read_yaml
from capt.pretrain.registry import VECTORS_TASK, task_module

_GIVEN_BY_CAPT = frozenset({"to", "overwrite", "about", "progress"})
_DONE = {"evaluate": "evaluated", "export": "converted", "predict": "asked for predictions"}
"""The participle of each command, for a message."""


def task_of(path: Path) -> str:
    """The type of the task that a checkpoint, or the best checkpoint of a run, was trained on.

    The manifest says so; ``config.yaml`` is read once the files are verified. A file is one of word vectors.

    Raises:
        CheckpointError: ``path`` is neither a checkpoint nor a run with one.
    """
    if path.is_file():
        return VECTORS_TASK
    from capt.pretrain.engine.checkpoint import find_best, read_manifest  # imports torch

    return read_manifest(find_best(path)).task


def command_module(checkpoint: Path, task: str, name: str) -> ModuleType:
    """The module ``name`` of the package of ``task``. Raises ``CheckpointError`` where either is absent."""
    try:
        module = task_module(task, name)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from None
    if module is None:
        raise CheckpointError(f"{checkpoint}: a checkpoint of task {task}, which cannot be {_DONE[name]}")
    return module


def accepted_options(
    command: Callable[..., Any], task: str, options: Mapping[str, Any], assignments: Sequence[str] = ()
) -> dict[str, Any]:
    """The keyword arguments for ``command``: the ``options`` that were given, and ``assignments``, ``NAME=VALUE`` each.

    Values of ``assignments`` are read as YAML and converted to the type of the keyword. An option that was given
    several times is a list; for a keyword that takes a single value it must have been given once.

    Raises:
        ConfigError: ``command`` has no such keyword, or the value is not of its type.
    """
    accepted = {name: value for name, value in options.items() if value is not None and value != []}
    lists = any(isinstance(value, list) for value in accepted.values())
    parameters = inspect.signature(command, eval_str=bool(assignments) or lists).parameters.values()
    keywords = {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    for name, value in accepted.items():
        if name not in keywords:
            takes = ", ".join(flag(each) for each in options if each in keywords) or "none of its kind, only -o"
            raise ConfigError(f"{flag(name)} has no meaning for a checkpoint of task {task}, which takes {takes}")
        if isinstance(value, list) and not _takes_several(keywords[name].annotation):
            if len(value) > 1:
                raise ConfigError(f"{flag(name)} may be given once for a checkpoint of task {task}")
            accepted[name] = value[0]
    own = keywords.keys() - _GIVEN_BY_CAPT
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--option {assignment}: not of the form NAME=VALUE")
        if name not in own:
            hint = did_you_mean(name, sorted(own), "it takes")
            raise ConfigError(f"--option {assignment}: task {task} has no option {name!r}; {hint}")
        annotation = keywords[name].annotation
        kind = TypeAdapter(Any if annotation is inspect.Parameter.empty else annotation)
        try:
            value = read_yaml(text, f"--option {assignment}")
        except NotYamlError:  # as in an override, what is not YAML is text
            value = text
        try:
            accepted[name] = kind.validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"--option {assignment}: {first_fault(error)}") from None
    return accepted


def flag(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"


def _takes_several(annotation: Any) -> bool:
    """Tell whether a keyword with this annotation takes a list or another sequence (but text), or does not say."""
    if annotation in (Any, inspect.Parameter.empty):
        return True
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    origins = [get_origin(kind) or kind for kind in kinds]
    return any(isinstance(kind, type) and issubclass(kind, Sequence) and kind is not str for kind in origins)
