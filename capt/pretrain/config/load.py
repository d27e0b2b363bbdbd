"""From a YAML file and ``a.b=c`` overrides to a validated job, with errors a person can act on."""

from __future__ import annotations

import difflib
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from capt.pretrain.base.errors import ConfigError, did_you_mean, quoted, shown
from capt.pretrain.base.files import read_text
from capt.pretrain.base.sensitive import has_secret
from capt.pretrain.config.base import NO_TEXT
from capt.pretrain.config.interpolation import interpolate
from capt.pretrain.config.reader import MAX_BYTES, MAX_DEPTH, NotYamlError, read_yaml
from capt.pretrain.config.schema import SCHEMA_VERSION, Job
from capt.pretrain.registry import job_class

_MAX_FILES = 50


def resolve_path(config: str | Path, *, sweep: bool = False) -> Path:
    """The file that a CONFIG argument means: a path, or the name of a shipped file.

    A shipped file's name is its path under ``configs`` without ``.yaml``, from any folder on as long as one file alone
    has it: ``capt_tiny``, ``rte`` or ``glue/rte``, ``ptb/vae``. Of a job and a sweep with the same name (``vqa``) it is
    the job, or the ``sweep`` where one is meant.
    """
    path = Path(config)
    if _is_file(path):
        return path
    shipped = _shipped()
    found = shipped.get(str(config), [])
    # A job and a sweep may have one name: the caller says which is meant.
    meant = [file for file in found if _is_sweep(file) is sweep] or found
    if len(meant) == 1:
        return meant[0]
    if found:
        several = ", ".join(sorted(_short_name(file) for file in found))
        raise ConfigError(f"{shown(str(config))} is the name of several shipped files: {several}")
    names = sorted(
        _short_name(file) for file in {file for files in shipped.values() for file in files} if _is_job(file)
    )
    near = difflib.get_close_matches(str(config)[:100], names, n=1)
    groups = dict.fromkeys(f"{name.split('/')[0]}/..." if "/" in name else name for name in names)
    hint = f"did you mean the shipped job {near[0]!r}?" if near else f"shipped: {', '.join(groups)}"
    raise ConfigError(f"no configuration file {shown(str(config))}; {hint}")


def shipped_jobs() -> dict[str, str]:
    """The names of the shipped jobs (a sweep's is ``sweep/NAME``) with the first sentence of the file's comment."""
    described = {}
    for file in sorted({file for found in _shipped().values() for file in found if _is_job(file)}):
        lines = read_text(file, limit=MAX_BYTES, error=ConfigError).splitlines()
        comment = " ".join(line[1:].strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines))
        sentence = re.split(r"\.\s+(?=[A-Z]|capt )", comment, maxsplit=1)[0]
        name = _longest_name(file) if _is_sweep(file) else _short_name(file)
        described[name] = f"{sentence.rstrip('.')}."
    return described


def _is_job(file: Path) -> bool:
    """Return whether a file is a job or a sweep, and not a base of others or a cluster's description."""
    return not file.stem.startswith("_") and file.parent.name != "cluster"


def _is_sweep(file: Path) -> bool:
    return _longest_name(file).startswith("sweep/")


def _short_name(file: Path) -> str:
    """Return the name as the documentation writes it: ``capt_tiny``, ``rte``, and with a folder ``ptb/vae``.

    A folder whose jobs share a ``_base.yaml`` is part of their names, which say too little without it.
    """
    return f"{file.parent.name}/{file.stem}" if (file.parent / "_base.yaml").is_file() else file.stem


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than a file's can be, or a folder that may not be looked into
        return False


def _shipped() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in sorted(Path(str(files("capt.configs"))).rglob("*.yaml")):
        parts = _longest_name(file).split("/")
        # Each end of the path is a name: `glue/rte` and `rte`.
        for start in range(len(parts)):
            found.setdefault("/".join(parts[start:]), []).append(file)
    return found


def _longest_name(file: Path) -> str:
    return file.relative_to(Path(str(files("capt.configs")))).with_suffix("").as_posix()


def _read(path: Path) -> dict[str, Any]:
    return parse_mapping(read_text(path, limit=MAX_BYTES, error=ConfigError), str(path))


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """The mapping in a YAML text, unresolved; ``source`` names it in errors. Raises ``ConfigError``."""
    try:
        value = read_yaml(text, source)
    except NotYamlError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: the file must hold a mapping of keys, got {type(value).__name__}")
    return value


def _with_bases(path: Path, chain: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The contents of a file's bases, their bases first, and its own; each file counts every time it is named."""
    path = path.resolve()
    if path in chain:
        raise ConfigError(f"{path}: base: goes round in a circle: {' -> '.join(p.name for p in (*chain, path))}")
    content = _read(path)
    bases = content.pop("base", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base: {shown(bases)}: it names a file or a shipped job, or a list of them")
    layers: list[dict[str, Any]] = []
    for base in bases:
        # Beside the file first, then among the shipped ones.
        beside = path.parent / base
        layers += _with_bases(beside if _is_file(beside) else resolve_path(base), (*chain, path))
        # Counted as they are read: two bases each, ten deep, are a thousand files.
        if len(layers) > _MAX_FILES:
            raise ConfigError(f"{path}: over {_MAX_FILES} files are read through base:; name fewer of them")
    return [*layers, content]


def _overrides(arguments: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ConfigError(f"override {shown(argument)} is not of the form a.b=value")
        if NO_TEXT.search(argument):
            raise ConfigError(f"override {shown(argument)} holds a line break or another character that is not text")
        *parents, last = key.split(".")
        if not last or not all(parents) or len(parents) > MAX_DEPTH:
            raise ConfigError(f"override {shown(argument)}: {shown(key)} is not a key; keys have the form a.b")
        try:
            value = read_yaml(text, f"override {shown(argument)}")
        except NotYamlError:
            if text[:1] + text[-1:] in ("[]", "{}"):  # what was meant as a list must not become a text silently
                raise ConfigError(
                    f"override {shown(argument.partition('=')[0])}: this list or mapping is not YAML; quote the texts "
                    """in it that hold one of ? : , [ ] { }, as 'data.files=["s3://bucket/a?.txt"]'"""
                ) from None
            value = text
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {shown(argument)}: {parent!r} is set to a value by another override")
        node[last] = value
    return result


def load_mapping(
    config: str | Path, overrides: Sequence[str] = (), *, resolved: bool = False, sweep: bool = False
) -> dict[str, Any]:
    """Merge a file, its bases and the overrides (later wins; lists are replaced) into one plain mapping.

    Args:
        config: a path, or the name of a shipped file.
        overrides: ``a.b=value`` each.
        resolved: ``config`` is what a run or a checkpoint wrote, maybe somebody else's: a path alone, no ``base:`` is
            followed, ``${...}`` is text, and nothing comes from the environment.
        sweep: ``config`` is the name of a sweep, if there is one of that name.

    Raises:
        ConfigError: a file is missing or malformed, a key occurs twice, an override or interpolation is invalid.
    """
    if resolved:
        return merge([_written(Path(config)), _overrides(overrides)])
    path = resolve_path(config, sweep=sweep)
    return interpolate(merge([*_with_bases(path), _overrides(overrides)]), str(path))


def _written(path: Path) -> dict[str, Any]:
    mapping = _read(path)
    if not mapping:
        raise ConfigError(
            f"{path}: empty, as a full disk or a crash leaves it: copy the config.yaml of a checkpoint over it, or "
            "remove the folder and start again"
        )
    return mapping


def merge(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge later layers over earlier ones; the task knows which keys take the place of which."""
    layers = [layer for layer in layers if layer]
    if len(layers) < 2:  # nothing takes a place: what somebody else's run holds is read without its task
        return _merged({}, layers[0]) if layers else {}
    types = [layer["task"].get("type") for layer in layers if isinstance(layer.get("task"), Mapping)]
    # The last file that names a task decides whose rules hold.
    task = job_class(types[-1]) if types and isinstance(types[-1], str) else Job
    return reduce(lambda below, above: _merged(task.replaced_by(below, above), above), layers, {})


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``above`` over ``below``: mappings are merged, everything else is replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"a": {"b": 1}}`` as ``{"a.b": 1}``; keys that are dotted already stay so, lists are values."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def flat_keys(job: Job) -> dict[str, Any]:
    """Return every key of ``job`` with its value, as `flatten` does: ``{"optimizer.lr": 0.0002}``."""
    return flatten(job.model_dump(mode="json", by_alias=True))


def load_job(config: str | Path, overrides: Sequence[str] = (), *, resolved: bool = False) -> Job:
    """Read, merge and validate a job; ``resolved`` is that of ``load_mapping``: a run's or a checkpoint's file.

    Raises:
        ConfigError: one line naming the file, the key, the value and what would be valid.
    """
    mapping = load_mapping(config, overrides, resolved=resolved)
    return job_from_mapping(mapping, str(config))


def job_from_mapping(mapping: Mapping[str, Any], source: str) -> Job:
    """Validate a merged mapping; ``source`` names it in errors."""
    version = mapping.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ConfigError(f"{source}: schema_version {shown(version)}; this release reads {SCHEMA_VERSION}")
    task = mapping.get("task")
    if not isinstance(task, Mapping) or not isinstance(task.get("type"), str):
        if "studies" in mapping:
            raise ConfigError(f"{source} is a sweep, not a job: capt sweep {quoted(source)}")
        raise ConfigError(f"{source}: task.type is missing; it names the job, for example capt_language")
    cls = job_class(task["type"])
    try:
        job = cls.model_validate(dict(mapping))
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, cls)}") from None
    assert isinstance(job, Job)
    return job


_TYPE = re.compile(r"^(constrained-\w+|literal\[|function-\w+\[|(bool|int|float|str)$)")
"""Parts that pydantic adds to the place of a value of several types: the type that it has tried."""


def explain(error: ValidationError, cls: type[BaseModel]) -> str:
    """Tell the first problem of a pydantic error in one line: key, value, what would be valid, the nearest key."""
    problems = error.errors(include_url=False)
    unknown = [each for each in problems if each["type"] == "extra_forbidden"]
    # A misspelt key that decides which others there are makes these unknown as well: it is the one in no list of keys.
    problem = next(
        (each for each in unknown if each["loc"][-1] not in _keys_at(cls, [str(part) for part in each["loc"][:-1]])),
        problems[0],
    )
    location = _location(problem)
    key = ".".join(part[:100] for part in location) or "configuration"
    if problem["type"] == "extra_forbidden":
        # The key exists, in the section of another kind, as of another task.
        valid = _keys_at(cls, location[:-1])
        if location[-1] in valid:
            return f"{key}: a key of another kind of {'.'.join(location[:-1])}, not of the one that this job names"
        return f"{key}: unknown key; {did_you_mean(location[-1], valid, 'valid:')}"
    message = problem["msg"].removeprefix("Value error, ")
    value = problem.get("input")
    # A whole section is not shown, and neither is what looks like a secret.
    if problem["type"] == "value_error" and (not isinstance(value, str | int | float) or has_secret(str(value))):
        return f"{key}: {message}"
    if problem["type"] == "missing":
        # The key that is missing may be a section: the first key that it needs says more.
        for needed in _required_below(cls, location):
            location.append(needed)
        key = ".".join(part[:100] for part in location)
        fields = (model.model_fields.get(location[-1]) for model in _models_at(cls, location[:-1]))
        meaning = next((field.description for field in fields if field is not None and field.description), None)
        return f"{key}: required key is missing" + (f": {meaning}" if meaning else "")
    if problem["type"] == "model_type":
        return f"{key}: {shown(value)}: it is a section; set a key of it, such as {key}.{_keys_at(cls, location)[0]}"
    if problem["type"] == "json_invalid":
        return f"{key}: {message[0].lower()}{message[1:]}"
    # Of a key that takes values of several types, pydantic tells a problem for each of them.
    alike = [each for each in problems if _location(each) == location]
    messages = [each["msg"].removeprefix("Value error, ") + _other_bounds(cls, location, each) for each in alike]
    expected = " or ".join(dict.fromkeys(f"{each[0].lower()}{each[1:]}" for each in messages))
    return f"{key}: {shown(value)}: {expected.replace(' or input should be ', ' or ')}"


def _location(problem: Any) -> list[str]:
    return [str(part) for part in problem["loc"] if not _TYPE.search(str(part))]


_BOUNDS = {
    "gt": "greater than", "ge": "greater than or equal to", "lt": "less than", "le": "less than or equal to",
}  # fmt: skip


def _other_bounds(cls: type[BaseModel], location: Sequence[str], problem: Any) -> str:
    """Say the other bounds of a number that is beyond the one that ``problem`` names; nothing where it has none."""
    passed = {name: problem.get("ctx", {}).get(name) for name in _BOUNDS}
    names = [part for part in location if not part.isdecimal()]  # without the number of an entry in a list
    for model in _models_at(cls, names[:-1]):
        for name, field in model.model_fields.items():
            for kinds in _kinds_in(field.annotation, field.metadata) if names[-1:] in ([name], [field.alias]) else ():
                bounds = {b: value for each in kinds for b in _BOUNDS if (value := getattr(each, b, None)) is not None}
                if any(b in bounds and bounds[b] == value for b, value in passed.items()):
                    others = [f"{_BOUNDS[b]} {value}" for b, value in bounds.items() if passed[b] is None]
                    return "".join(f" and {each}" for each in others)
    return ""


def _kinds_in(annotation: Any, metadata: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield what is said of each of the types that a field takes."""
    yield [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else [each])]
    for argument in get_args(annotation):
        yield from _kinds_in(argument, getattr(argument, "__metadata__", ()))


def _required_below(cls: type[BaseModel], location: Sequence[str]) -> list[str]:
    """The first key that a section at ``location`` must have, with the sections that lead to it; none of a value."""
    fields = [model.model_fields.get(location[-1]) for model in _models_at(cls, location[:-1])]
    path: list[str] = []
    sections = [model for field in fields if field is not None for model in _models_in(field.annotation)]
    while sections:
        required = [item for model in sections for item in model.model_fields.items() if item[1].is_required()]
        if not required:
            break
        path.append(required[0][1].alias or required[0][0])
        sections = _models_in(required[0][1].annotation)
    return path


def _keys_at(cls: type[BaseModel], location: Sequence[str]) -> list[str]:
    fields = [item for model in _models_at(cls, location) for item in model.model_fields.items()]
    return list(dict.fromkeys(field.alias or name for name, field in fields))


def _models_at(cls: type[BaseModel], location: Sequence[str]) -> list[type[BaseModel]]:
    models: list[type[BaseModel]] = [cls]
    for part in location:
        found = [
            model
            for parent in models
            for name, field in parent.model_fields.items()
            if part in (name, field.alias)
            for model in _models_in(field.annotation)
        ]
        # A key that is not found leaves the models as they are: the nearest ones are named.
        models = found or models
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) in (Union, UnionType):
        return [model for argument in get_args(annotation) for model in _models_in(argument)]
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return []
    # A section of several kinds is an abstract class; those kinds are known whose module has been imported.
    return annotation.__subclasses__() if inspect.isabstract(annotation) else [annotation]
