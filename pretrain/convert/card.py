"""The parts of a model card that do not depend on the kind of model: measurements, tables, versions, names of files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pretrain.base.sensitive import has_secret
from pretrain.engine.metrics_file import METRICS, VALIDATION, Row, read_metrics

logger = logging.getLogger(__name__)

_PACKAGES = ("capt-pretraining", "torch", "transformers", "tokenizers", "safetensors")
_NOT_OF_THE_MODEL = {
    "lr", "grad_norm", "mfu", "seconds_per_step", "samples_per_second", "tokens_per_second",
}  # fmt: skip
"""Figures that describe the machine or a setting and not the model."""


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
    rows = [f"| {key} | {cell(value)} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def cell(value: Any) -> str:
    """A value as the text of a table's cell: six digits of a number, a list's items, one line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value)
    return str(value).replace("|", "\\|").replace("\n", " ")


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
