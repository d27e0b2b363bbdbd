"""Fields of a model card that no run records: licence, languages, the base model, results for the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from pretrain.base.errors import ConfigError
from pretrain.base.files import read_json
from pretrain.models.hub import hub_id, is_hub_id

IMPORTED = "imported.json"
"""A file of an imported run. Its ``source`` is the hub id (with its revision) or the folder's name of the model."""

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|code|multilingual")


@dataclass(frozen=True)
class About:
    """Keys of a card's head, by the hub's names; what is not known is left out.

    Attributes:
        license: ``apache-2.0``, ``mit``, ``cc-by-4.0``, ...
        languages: ISO 639 codes, such as ``en``.
        base_model: the hub id of the model that training started from.
        location: what the loading example names: a hub id, or ``PATH`` for the reader to fill in.
    """

    license: str | None = None
    languages: tuple[str, ...] = ()
    base_model: str | None = None
    location: str = "PATH"

    def __post_init__(self) -> None:
        if self.license is not None and not _LICENSE.fullmatch(self.license):
            raise ConfigError(f"--license {self.license!r}: an id of the hub such as apache-2.0, mit or cc-by-4.0")
        for language in self.languages:
            if not _LANGUAGE.fullmatch(language):
                raise ConfigError(f"--language {language!r}: an ISO 639 code such as en, de or zh")
        if self.base_model is not None and not is_hub_id(self.base_model):
            raise ConfigError(f"--base-model {self.base_model!r}: a hub id such as FacebookAI/roberta-base")

    def started_from(self, init: Path | None, run: Path) -> About:
        """This with ``base_model`` filled in where ``model.init``, or what ``run`` was imported from, is a hub id."""
        if self.base_model is not None:
            return self
        named = None if init is None else hub_id(init)
        if named is None and (run / IMPORTED).is_file():
            named = hub_id(Path(_imported(run / IMPORTED)))
        return self if named is None else replace(self, base_model=named[0])

    def head(self, fields: Mapping[str, Any], name: str, results: Sequence[Mapping[str, Any]]) -> str:
        """The YAML head: ``fields``, what is known here, and ``results`` as the hub's ``model-index``."""
        known = {
            "license": self.license,
            "language": list(self.languages),
            "base_model": self.base_model,
            "model-index": [{"name": name, "results": [dict(result) for result in results]}] if results else None,
        }
        written = {**fields, **{key: value for key, value in known.items() if value}}
        return "---\n" + yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=1000) + "---"


def result(task: str, dataset: str, metrics: Mapping[str, float | None], *, kind: str | None = None) -> dict[str, Any]:
    """One entry of a ``model-index``: finite ``metrics`` of ``dataset`` (of type ``kind``)."""
    return {
        "task": {"type": task},
        "dataset": {"name": dataset, "type": kind or re.sub(r"[^a-z0-9]+", "-", dataset.lower()).strip("-") or "text"},
        "metrics": [
            {"type": name.split("/")[0], "name": name, "value": round(value, 6)}
            for name, value in metrics.items()
            if value is not None
        ],
    }


class _Imported(BaseModel):
    model_config = ConfigDict(strict=True)
    source: str


def _imported(path: Path) -> str:
    try:
        return _Imported.model_validate(read_json(path, limit=10_000)).source
    except ValidationError:
        raise ConfigError(f"{path}: not what capt convert --from writes; remove the file") from None
