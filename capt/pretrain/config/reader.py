"""YAML as plain values, from text that anybody may have written: bounded, and without YAML 1.1's traps.

As YAML 1.2 reads it: ``1e-4`` is a number, ``010`` is ten, and ``no``, ``on``, ``24:00:00`` and ``2026-11-20`` are
text. A key that occurs twice is an error, keys are text, and no tag makes an object. The parser's events become values
one by one, so that a bound is noticed when it is passed and not once gigabytes have been built.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentEndEvent,
    Event,
    ScalarEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from capt.pretrain.base.errors import ConfigError, shown
from capt.pretrain.config.schema import Job

MAX_BYTES = 1_000_000
MAX_VALUES = 10_000
MAX_DEPTH = 30
_DIGITS = 19
_TAG = "tag:yaml.org,2002:"
_WORDS = {"true": True, "false": False}

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*")
FLOAT = re.compile(
    r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.(?:[0-9]+(?:_[0-9]+)*)?|\.[0-9]+|[0-9]+(?:_[0-9]+)*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
)


class NotYamlError(ValueError):
    """The text is not YAML, or asks for a tag that is not read; the message says where."""


def read_yaml(text: str, source: str) -> Any:
    """The one document in ``text`` as None, bool, int, float, str, list and dict (keys are str).

    Raises:
        NotYamlError: the text is not YAML.
        ConfigError: it is too large or too deep, a key occurs twice, or a number or a character cannot be meant.
    """
    try:
        return _Document(text, source).read()
    except yaml.YAMLError as error:
        raise NotYamlError(" ".join(str(error).split())) from None
    except (ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ConfigError | NotYamlError):
            raise
        raise NotYamlError(f"{type(error).__name__}: {error}") from None  # an escape such as "\U00110000"


def as_override(key: str, text: str) -> str:
    """``key=text``, an override that sets the key to this text: quoted where YAML would read something else."""
    try:
        as_it_is = read_yaml(text, key) == text
    except NotYamlError:  # the value of an override that is not YAML is text
        as_it_is = True
    except ConfigError:
        as_it_is = False
    return f"{key}={text if as_it_is else json.dumps(text, ensure_ascii=False)}"


class _Document:
    def __init__(self, text: str, source: str) -> None:
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{source}: over {MAX_BYTES:,} characters; a configuration has fewer")
        self._source = source
        self._parser = yaml.SafeLoader(text)
        self._anchors: dict[str, Any] = {}
        self._values = 0

    def read(self) -> Any:
        # The parser's events of a document: the stream, the document, one value, and the ends of both.
        self._next()  # the stream's start
        if isinstance(self._next(), StreamEndEvent):
            return None
        value = self._value(self._next(), 1)
        assert isinstance(self._next(), DocumentEndEvent)
        if not isinstance(self._next(), StreamEndEvent):
            raise ConfigError(f"{self._source}: a second document (---) begins; a configuration is one")
        return value

    def _next(self) -> Event:
        event = self._parser.get_event()
        assert isinstance(event, Event)
        return event

    def _value(self, event: Event, depth: int) -> Any:
        self._count(1)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{self._source}: {_line(event)}nested over {MAX_DEPTH} deep")
        if isinstance(event, AliasEvent):
            return self._again(event, depth)
        assert isinstance(event, ScalarEvent | CollectionStartEvent)
        if isinstance(event, ScalarEvent):
            value = self._scalar(event)
        elif event.tag not in (None, "!", f"{_TAG}seq", f"{_TAG}map"):
            raise NotYamlError(f"{_line(event)}the tag {shown(event.tag)} is not read here")
        elif isinstance(event, SequenceStartEvent):
            value = self._list(depth)
        else:
            value = self._dict(depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _list(self, depth: int) -> list[Any]:
        values = []
        while not isinstance(event := self._next(), CollectionEndEvent):
            values.append(self._value(event, depth + 1))
        return values

    def _dict(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := self._next(), CollectionEndEvent):
            line = _number_of_line(event)
            if not isinstance(event, ScalarEvent):
                raise ConfigError(f"{self._source}: line {line}: a key must be a word")
            key = self._text(event)
            # The merge key of YAML 1.1, which would be a key like any other here.
            if key == "<<" and event.implicit[0]:
                raise ConfigError(f"{self._source}: line {line}: << is not read here; base: names what to build on")
            if key in lines:
                where = f"line {lines[key]} and again on line {line}"
                raise ConfigError(f"{self._source}: key {shown(key)} is on {where}")
            lines[key] = line
            values[key] = self._value(self._next(), depth + 1)
        return values

    def _again(self, event: AliasEvent, depth: int) -> Any:
        if event.anchor not in self._anchors:
            raise NotYamlError(f"{_line(event)}there is no anchor {shown(event.anchor)} above")
        return self._copy(self._anchors[event.anchor], depth)

    def _copy(self, value: Any, depth: int) -> Any:
        """Aliases are counted as what they represent: ten lines can name a billion values."""
        self._count(1)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{self._source}: nested over {MAX_DEPTH} deep")
        if isinstance(value, list):
            return [self._copy(item, depth + 1) for item in value]
        if isinstance(value, dict):
            return {key: self._copy(item, depth + 1) for key, item in value.items()}
        return value

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise ConfigError(f"{self._source}: over {MAX_VALUES:,} values; a configuration has fewer")

    def _text(self, event: ScalarEvent) -> str:
        text = str(event.value)
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigError(f"{self._source}: {_line(event)}{shown(text)} holds a character that is not text")
        return text

    def _scalar(self, event: ScalarEvent) -> Any:
        text, tag = self._text(event), event.tag
        plain = tag is None and event.implicit[0]
        # Quoted text is text, whatever it looks like.
        if tag in (None, "!", f"{_TAG}str") and not plain:
            return text
        kinds = {"null": _NULL, "bool": _BOOL, "int": _INT, "float": FLOAT}
        if plain:
            kind = next((name for name, pattern in kinds.items() if pattern.fullmatch(text)), "str")
        else:
            kind = str(tag).removeprefix(_TAG)
            # A whole number under !!float is one, as in YAML 1.2.
            if kind not in kinds or not (kinds[kind].fullmatch(text) or (kind == "float" and _INT.fullmatch(text))):
                raise NotYamlError(f"{_line(event)}{shown(text)} cannot be read under the tag {shown(tag)}")
        return self._number(event, text, kind) if kind in ("int", "float") else _simple(text, kind)

    def _number(self, event: ScalarEvent, text: str, kind: str) -> int | float:
        digits = text.replace("_", "")
        if kind == "int":
            # More digits than 64 bits have; Python would take minutes for a million of them.
            if len(digits.lstrip("+-0")) > _DIGITS:
                raise ConfigError(f"{self._source}: {_line(event)}{shown(text)}: a number has at most {_DIGITS} digits")
            return int(digits)
        value = float(digits)
        if not math.isfinite(value):
            raise ConfigError(f"{self._source}: {_line(event)}{shown(text)}: too large for a number")
        return value


def _simple(text: str, kind: str) -> Any:
    return {"null": None, "bool": _WORDS.get(text.lower()), "str": text}[kind]


def _number_of_line(event: Event) -> int:
    assert event.start_mark is not None
    return int(event.start_mark.line) + 1


def _line(event: Event) -> str:
    return f"line {_number_of_line(event)}: "


# YAML text that :mod:`capt.pretrain.config.reader` reads back as the same values.


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 reads as a number: PyYAML, which writes YAML 1.1, leaves ``1e-4`` without quotes."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if FLOAT.fullmatch(text) else None)


_Dumper.add_representer(str, _text)


def to_yaml(mapping: Mapping[str, Any]) -> str:
    """A configuration of plain values (mappings, lists, text, numbers) as YAML, its keys in their order."""
    text: str = yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def job_to_yaml(job: Job) -> str:
    """The resolved configuration of a job, which ``load_job`` reads back."""
    return to_yaml(job.model_dump(mode="json", by_alias=True))
