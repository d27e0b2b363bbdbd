"""A model card of any kind of model: its parts in order, measurements, tables, versions, names of files."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pretrain.base.sensitive import has_secret
from pretrain.engine.metrics_file import METRICS, VALIDATION, Row, read_metrics
from pretrain.models.hub import is_hub_id

logger = logging.getLogger(__name__)

_PACKAGES = ("capt-pretraining", "torch", "transformers", "tokenizers", "safetensors")
_NOT_OF_THE_MODEL = {
    "lr", "grad_norm", "mfu", "seconds_per_step", "samples_per_second", "tokens_per_second",
}  # fmt: skip
"""Figures that describe the machine or a setting and not the model."""
_MARKUP = re.compile(r"[&<>\[\]|`*\\~$!]|\b_|_\b|(?<=\w):(?=//)|^([#+-]|\d+[.)])|(?<=www)\.")
"""What is or begins markup. An underscore within a word, as in names of metrics, does not."""
_PATHS = {"model.init", "data.name", "data.files", "data.train", "data.regions"}
"""Keys of jobs that name files, folders or models of the hub."""


def compose(
    head: str,
    name: str,
    summary: str,
    use: str,
    *,
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    evaluations: Sequence[str],
    metrics: Mapping[str, Any],
    caveats: Sequence[str],
) -> str:
    """The text of a ``README.md``; parts of which nothing is known are left out.

    Args:
        head: the YAML head (`pretrain.convert.about.About.head`).
        name: the title.
        summary: what the weights are, in a sentence or two.
        use: how to load them, as Markdown.
        model: facts of the architecture.
        training: facts of the training (`training_facts`).
        evaluations: what ``capt evaluate`` has measured, each as Markdown.
        metrics: last measurements of the run (`final_metrics`).
        caveats: the limitations, a line each.
    """
    parts = [head, f"# {plain_text(name)}", summary, "## Use\n\n" + use, "## Model\n\n" + table(model)]
    if training:
        parts.append("## Training\n\n" + table(training))
    if evaluations:
        parts.append("## Evaluation\n\n" + "\n\n".join(evaluations))
    if metrics:
        parts.append("## Last measurements of the run\n\n" + table(metrics))
    parts.append("## Versions\n\n" + table(versions()))
    parts.append("## Limitations\n\n" + "\n".join(f"- {line}" for line in caveats))
    return "\n\n".join(parts) + "\n"


def training_facts(
    job: Mapping[str, Any],
    progress: Mapping[str, int],
    keys: Iterable[tuple[str, str]],
    counted: Mapping[str, str],
) -> dict[str, Any]:
    """The values of ``keys`` (``a.b``, and a label) in a job, and how far the training is; what is unset is left out.

    Of paths only the last part is shown. ``counted`` labels the numbers of ``progress``.
    """
    facts: dict[str, Any] = {}
    for key, label in keys:
        value = lookup(job, key)
        if value in (None, [], ()):
            continue
        if key in _PATHS:
            many = isinstance(value, list | tuple)
            value = [last_part(file) for file in value] if many else _shown_source(value)
        facts[label] = value
    return facts | {label: progress[key] for key, label in counted.items() if key in progress}


def lookup(job: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in nested mappings; None where there is none."""
    value: Any = job
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown_source(value: Any) -> str:
    return str(value) if is_hub_id(str(value)) else last_part(value)


def final_metrics(run: Path, step: int) -> dict[str, float]:
    """The last training and the last validation row of ``run/metrics.jsonl`` up to ``step``; empty without such a file.

    Names of validation rows carry the prefix ``validation/``.
    """
    if not (run / METRICS).exists():
        return {}
    metrics = read_metrics(run / METRICS)
    for note in metrics.notes:
        logger.warning("%s: %s", run, note)
    measured: dict[str, float] = {}
    for prefix, rows in (("", metrics.training), (f"{VALIDATION}/", metrics.validation)):
        last = next((row for row in reversed(rows) if row.step <= step), Row(step))
        measured |= {
            f"{prefix}{key}": value
            for key, value in last.figures.items()
            if key.partition("/")[0] not in _NOT_OF_THE_MODEL
        }
    return measured


def table(facts: Mapping[str, Any]) -> str:
    """A Markdown table of two columns without titles."""
    rows = [f"| {plain_text(key)} | {cell(value)} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def cell(value: Any) -> str:
    """A value as the text of a table's cell: six digits of a number, a list's items, one line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value)
    return str(value) if isinstance(value, int) else plain_text(str(value))


def plain_text(text: str) -> str:
    """``text`` so that Markdown and HTML show it as it is, in one line: it may be somebody else's.

    Entities and not backslashes: they mean the same to a reader of Markdown and to one that only knows HTML.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _MARKUP.sub(lambda found: "".join(f"&#{ord(c)};" for c in found[0]), line)


def last_part(path: Any) -> str:
    """The last part of a path or address: no folder of somebody's home, no query, nothing that looks like a token."""
    name = Path(str(path).partition("?")[0]).name
    return "(not shown)" if has_secret(name) else name


def versions() -> dict[str, str]:
    """The installed release of each package that an export depends on."""
    return {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "run from its source tree, not installed"
