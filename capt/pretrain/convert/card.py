"""A model card of any kind of model: its parts in order, measurements, tables, versions, names of files."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import read_json
from capt.pretrain.base.sensitive import has_secret
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.metrics_file import METRICS, VALIDATION, MetricsRow, read_metrics
from capt.pretrain.models.hf_config import hub_id, is_hub_id

logger = logging.getLogger(__name__)

IMPORTED = "imported.json"
"""A file of an imported run. Its ``source`` is the hub id (with its revision) or the folder's name of the model."""

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|code|multilingual")


def caveats_of_family(model_type: str) -> tuple[str, ...]:
    """Warnings for users of an encoder of this family: releases of sentence-transformers whose vectors are worse."""
    return (_SHIFTED,) if model_type in ("roberta", "xlm-roberta", "camembert", "mpnet") else ()


_SHIFTED = (
    "Use sentence-transformers 5.7 or newer, or older than 5.4, where attention is flash attention: releases from "
    "5.4.1 to 5.6.0 flatten such batches and shift the positions of this family (by `padding_idx` + 1), without an "
    "error. Padded batches (`model[0].unpad_inputs = False`) are right in all of them."
)
"""Read in the sources of 5.3.0, 5.4.1, 5.5.0, 5.5.1, 5.6.0, 5.7.0, 6.0.0 and 6.2.0."""


@dataclass(frozen=True)
class About:
    """Keys of a card's head that no run records, by the hub's names; what is not known is left out.

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
        """Fill in ``base_model`` where ``model.init``, or what ``run`` was imported from, is a hub id."""
        if self.base_model is not None:
            return self
        # The model that model.init names comes before the source of an imported run.
        named = None if init is None else hub_id(init)
        if named is None and (run / IMPORTED).is_file():
            named = hub_id(Path(_imported(run / IMPORTED)))
        return self if named is None else replace(self, base_model=named[0])

    def head(self, fields: Mapping[str, Any], name: str, results: Sequence[Mapping[str, Any]]) -> str:
        """Return the YAML head: ``fields``, what is known here, and ``results`` as the hub's ``model-index``."""
        known = {
            "license": self.license,
            "language": list(self.languages),
            "base_model": self.base_model,
            "model-index": [{"name": name, "results": [dict(result) for result in results]}] if results else None,
        }
        written = {**fields, **{key: value for key, value in known.items() if value}}
        return "---\n" + yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=1000) + "---"


def result(task: str, dataset: str, metrics: Mapping[str, float | None], *, kind: str | None = None) -> dict[str, Any]:
    """Return one entry of a ``model-index``: finite ``metrics`` of ``dataset`` (of type ``kind``)."""
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


_PACKAGES = ("capt-pretraining", "torch", "transformers", "tokenizers", "safetensors")
_NOT_OF_THE_MODEL = {
    "lr", "grad_norm", "mfu", "seconds_per_step", "samples_per_second", "tokens_per_second",
    "memory/peak", "memory/reserved", "memory/retries",
}  # fmt: skip
"""Figures that describe the machine or a setting and not the model."""
_MARKUP = re.compile(r"[&<>\[\]|`*\\~$!]|\b_|_\b|(?<=\w):(?=//)|^(#|[+-](?!\d)|\d+[.)](?=\s|$))|(?<=www)\.")
"""The beginnings of markup: no underscore within a word, as in names of metrics, and no number at the start."""
_PATHS = {"model.init", "data.name", "data.files", "data.train", "data.regions"}
"""Keys of jobs that name files, folders or models of the hub."""


@dataclass(frozen=True)
class CardFacts:
    """The facts of a checkpoint and its run that a model card shows.

    Attributes:
        name: the title: the name of the run.
        job: the resolved configuration as a mapping of sections.
        progress: how far the training is: ``step``, ``samples``, ``tokens``.
        metrics: last measurements of the run (`final_metrics`).
        about: licence, languages and the like, for the head.
    """

    name: str
    job: Mapping[str, Any]
    progress: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    about: About = About()

    @classmethod
    def read(cls, checkpoint: Path, job: Job, init: Path | None, about: About | None) -> CardFacts:
        """Read the facts of ``RUN/checkpoints/STEP``, whose training has started from ``init``."""
        from capt.pretrain.engine.checkpoint import read_metadata  # imports torch

        run = checkpoint.resolve().parent.parent
        progress = read_metadata(checkpoint).progress.model_dump()
        mapping = job.model_dump(mode="json", by_alias=True)
        found = (about or About()).started_from(init, run)
        return cls(run.name, mapping, progress, final_metrics(run, progress["step"]), found)

    def validated(self) -> CardFacts:
        """Leave the figures of training out, which say nothing about a fine-tuned model."""
        return replace(self, metrics={name: x for name, x in self.metrics.items() if name.startswith(f"{VALIDATION}/")})

    def training(self, keys: Iterable[tuple[str, str]], counted: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of ``keys`` (``a.b``, and a label), and how far the training is; what is unset is left out.

        Of paths only the last part is shown. ``counted`` labels the numbers of ``progress``.
        """
        facts: dict[str, Any] = {}
        for key, label in keys:
            value = lookup(self.job, key)
            if value in (None, [], ()):
                continue
            if key == "data.mixture":
                value = [part["name"] for part in value]
            if key in _PATHS:
                many = isinstance(value, list | tuple)
                value = [last_part(file) for file in value] if many else _shown_source(value)
            facts[label] = value
        return facts | {label: self.progress[key] for key, label in counted.items() if key in self.progress}

    def card(
        self,
        fields: Mapping[str, Any],
        summary: str,
        use: str,
        *,
        model: Mapping[str, Any],
        training: Mapping[str, Any],
        caveats: Sequence[str],
        results: Sequence[Mapping[str, Any]] = (),
        evaluations: Sequence[str] = (),
    ) -> str:
        """Return the text of a ``README.md``; parts of which nothing is known are left out.

        Args:
            fields: keys of the head that the kind of model decides.
            summary: what the weights are, in a sentence or two.
            use: how to load them, as Markdown, with PATH in the place of the folder.
            model: facts of the architecture.
            training: facts of the training (`training`).
            caveats: the limitations, a line each.
            results: figures for the hub's ``model-index`` (`result`).
            evaluations: what ``capt evaluate`` has measured, each as Markdown.
        """
        parts = {
            "Use": use.replace("PATH", self.about.location),
            "Model": table(model),
            "Training": table(training) if training else "",
            "Evaluation": "\n\n".join(evaluations),
            "Last measurements of the run": table(self.metrics) if self.metrics else "",
            "Versions": table(versions()),
            "Limitations": "\n".join(f"- {line}" for line in caveats),
        }
        head = [self.about.head(fields, self.name, results), f"# {plain_text(self.name)}", summary]
        return "\n\n".join([*head, *(f"## {title}\n\n{part}" for title, part in parts.items() if part)]) + "\n"


def lookup(job: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in nested mappings; None where there is none."""
    value: Any = job
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown_source(value: Any) -> str:
    return str(value) if is_hub_id(str(value)) else last_part(value)


def final_metrics(run: Path, step: int) -> dict[str, float]:
    """Read the last training and validation row of ``run/metrics.jsonl`` up to ``step``; empty without such a file.

    Names of validation rows carry the prefix ``validation/``.
    """
    if not (run / METRICS).exists():
        return {}
    metrics = read_metrics(run / METRICS)
    for note in metrics.notes:
        logger.warning("%s: %s", run, note)
    measured: dict[str, float] = {}
    for prefix, rows in (("", metrics.training), (f"{VALIDATION}/", metrics.validation)):
        # A row after the checkpoint is of weights that this export does not have.
        last = next((row for row in reversed(rows) if row.step <= step), MetricsRow(step))
        measured |= {
            f"{prefix}{key}": value
            for key, value in last.figures.items()
            if key.partition("/")[0] not in _NOT_OF_THE_MODEL
        }
    return measured


def table(facts: Mapping[str, Any]) -> str:
    """Return a Markdown table of two columns without titles."""
    rows = [f"| {plain_text(key)} | {cell(value)} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def cell(value: Any) -> str:
    """Return a value as the text of a table's cell: six digits of a number, a list's items, one line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value)
    return str(value) if isinstance(value, int) else plain_text(str(value))


def plain_text(text: str) -> str:
    """Escape ``text`` so that Markdown and HTML show it as it is, in one line: it may be somebody else's.

    Entities and not backslashes: they mean the same to a reader of Markdown and to one that only knows HTML.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _MARKUP.sub(lambda found: "".join(f"&#{ord(c)};" for c in found[0]), line)


def last_part(path: Any) -> str:
    """Return the last part of a path or address: no folder of somebody's home, no query, nothing like a token."""
    name = Path(str(path).partition("?")[0]).name
    return "(not shown)" if has_secret(name) else name


def versions() -> dict[str, str]:
    """Return the installed release of each package that an export depends on."""
    return {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "run from its source tree, not installed"
