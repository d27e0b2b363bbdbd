"""From a YAML file and ``a.b=c`` overrides to a validated job, with errors a person can act on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from pretrain.config.schema import SCHEMA_VERSION, Job
from pretrain.tasks import job_class
from tokenizer.errors import ConfigError, instead_of

_MAX_BYTES = 1_000_000


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its traps, as 1.2 reads it: duplicate keys are errors, ``1e-4`` is a number, ``010`` is ten,
    and ``no``, ``on``, ``24:00:00`` and ``2026-11-20`` are text."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        line = key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(f"{loader.name}: key {key!r} stands on line {seen[key]} and again on line {line}")
        seen[key] = line
    return dict(loader.construct_pairs(node))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, regexp)
        for tag, regexp in resolvers
        if tag.removeprefix("tag:yaml.org,2002:") not in ("bool", "float", "int", "timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile("^[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(node.value)))


def resolve_path(config: str | Path) -> Path:
    """The file that a CONFIG argument means: a path, or the name of a shipped file.

    A shipped file's name is its path under ``configs`` without ``.yaml``, from any folder on as long as one file alone
    has it: ``capt_tiny``, ``rte`` or ``glue/rte``, ``ptb/vae``.
    """
    path = Path(config)
    if path.is_file():
        return path
    shipped = _shipped()
    found = shipped.get(str(config), [])
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(sorted(_longest_name(file) for file in found))
        raise ConfigError(f"{str(config)!r} is the name of several shipped files: {names}")
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    public = sorted({file.stem for files in shipped.values() for file in files if not file.stem.startswith("_")})
    hint = f"did you mean the shipped job {near[0]!r}?" if near else f"shipped jobs: {', '.join(public)}"
    raise ConfigError(f"no configuration file {str(config)!r}; {hint}")


def _shipped() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in sorted(Path(str(files("configs"))).rglob("*.yaml")):
        parts = _longest_name(file).split("/")
        for start in range(len(parts)):
            found.setdefault("/".join(parts[start:]), []).append(file)
    return found


def _longest_name(file: Path) -> str:
    return file.relative_to(Path(str(files("configs")))).with_suffix("").as_posix()


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"{path}: {path.stat().st_size} bytes; a configuration is at most {_MAX_BYTES}")
    try:
        loader = _Loader(path.read_text(encoding="utf-8-sig"))
        loader.name = str(path)
        value = loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: the file must hold a mapping of keys, got {type(value).__name__}")
    return value


def _with_bases(path: Path, chain: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    path = path.resolve()
    if path in chain:
        raise ConfigError(f"{path}: base: goes round in a circle: {' -> '.join(p.name for p in (*chain, path))}")
    content = _read(path)
    bases = content.pop("base", [])
    layers: list[dict[str, Any]] = []
    for base in [bases] if isinstance(bases, str) else bases:
        beside = path.parent / base
        layers += _with_bases(beside if beside.is_file() else resolve_path(base), (*chain, path))
    return [*layers, content]


def _overrides(arguments: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ConfigError(f"override {argument!r} is not of the form a.b=value")
        try:
            value = yaml.load(text, Loader=_Loader) if text else None
        except yaml.YAMLError:
            value = text
        node = result
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {argument!r}: {parent!r} is set to a value by another override")
        node[last] = value
    return result


def load_mapping(config: str | Path, overrides: Sequence[str] = (), *, resolved: bool = False) -> dict[str, Any]:
    """Merge a file, its bases and the overrides (later wins; lists are replaced) into one plain mapping.

    Args:
        config: a path, or the name of a shipped file.
        overrides: ``a.b=value`` each.
        resolved: ``config`` is what a run or a checkpoint wrote, maybe somebody else's: a path alone, no ``base:`` is
            followed, ``${...}`` is text, and nothing comes from the environment.

    Raises:
        ConfigError: a file is missing or malformed, a key stands twice, an override or interpolation is invalid.
    """
    if resolved:
        return _merged(_read(Path(config)), _overrides(overrides))
    path = resolve_path(config)
    layers = [*_with_bases(path), _overrides(overrides)]
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(*layers), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``: mappings are merged, everything else is replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; keys that are dotted already stay so, lists are values."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


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
        raise ConfigError(f"{source}: schema_version {version!r}; this release reads {SCHEMA_VERSION}")
    task = mapping.get("task")
    if not isinstance(task, Mapping) or not isinstance(task.get("type"), str):
        raise ConfigError(f"{source}: task.type is missing; it names the job, for example capt_language")
    cls = job_class(task["type"])
    try:
        job = cls.model_validate(dict(mapping))
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, cls)}") from None
    assert isinstance(job, Job)
    return job


def explain(error: ValidationError, cls: type[BaseModel]) -> str:
    """The first problem of a pydantic error in one line: key, value, what would be valid, the nearest key."""
    problem = error.errors()[0]
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location) or "configuration"
    if problem["type"] == "extra_forbidden":
        valid = _keys_at(cls, location[:-1])
        return f"{key}: unknown key; {instead_of(location[-1], valid, 'valid:')}"
    message = problem["msg"].removeprefix("Value error, ")
    value = problem.get("input")
    if problem["type"] == "value_error" and not isinstance(value, str | int | float):
        return f"{key}: {message}"
    if problem["type"] == "missing":
        return f"{key}: required key is missing"
    return f"{key}: {value!r}: {message[0].lower()}{message[1:]}"


def _keys_at(cls: type[BaseModel], location: Sequence[str]) -> list[str]:
    models: list[type[BaseModel]] = [cls]
    for part in location:
        found = [
            model
            for parent in models
            for name, field in parent.model_fields.items()
            if part in (name, field.alias)
            for model in _models_in(field.annotation)
        ]
        models = found or models
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) in (Union, UnionType):
        return [model for argument in get_args(annotation) for model in _models_in(argument)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
