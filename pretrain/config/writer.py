"""YAML text that :mod:`pretrain.config.reader` reads back as the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from pretrain.config.reader import FLOAT
from pretrain.config.schema import Job


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
