"""Runs of text as rows of the paper's tables: the name of the row, and the metrics of the run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pretrain.base.errors import DataError, quoted
from pretrain.base.files import read_json
from pretrain.base.records import Count, Record, parse_record
from pretrain.latent.artifacts import EVALUATION, GENERATED_TEXT
from pretrain.latent.report.published import PUBLISHED, SENTENCES
from pretrain.report.runs import RunRecord


class _Estimate(Record):
    """What the tables read of a perplexity with its errors."""

    value: float
    draws: Count
    sentences: Count
    nats: float | None = None
    standard_error: float | None = None
    proposal: Literal["exact", "q", "prior", "mixture", "refitted"] | None = None
    ppl_best_there: float | None = None
    tightest_minus_bridge: float | None = None
    tightest_minus_bridge_standard_error: float | None = None


class _Generated(Record):
    """What the tables read of the perplexities of generated text."""

    number: Count = 0
    by: str = ""
    forward_ppl: float | None = None
    reverse_train_ppl: float | None = None
    reverse_test_ppl: float | None = None


@dataclass(frozen=True)
class ModelRow:
    """A run of text as a row of the tables.

    Attributes:
        name: what the paper calls the model.
        variant: how it differs from the released code.
        dataset: ``ptb``, ``yahoo``, ``yelp`` or nothing, by the names of its files.
        run: the run.
        metrics: those of ``capt evaluate`` on the test text, else those of the best validation.
        measured: where the metrics come from.
        generated: the perplexities of generated text, empty where they were not measured.
        estimates: perplexities with their errors, draws and sentences, as ``capt evaluate`` wrote them.
    """

    name: str
    variant: str
    dataset: str
    run: RunRecord
    metrics: Mapping[str, float]
    measured: str
    generated: Mapping[str, float]
    estimates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name with variant and dataset, such as ``clVAE+ (mlp, mean_inside; ptb)``."""
        return _with_details(self.name, self.variant, self.dataset)

    @property
    def text(self) -> str:
        """The paper's text that was measured, ``ptb``, ``yahoo`` or ``yelp``; nothing where it has another size."""
        return self.dataset if self.get("sentences") in SENTENCES.get(self.dataset, ()) else ""

    @property
    def published(self) -> tuple[float, float, float, float, int] | None:
        """The paper's -ELBO, PPL, KL, MI and AU, where it has this row on this text."""
        return PUBLISHED.get(self.text, {}).get(self.name)

    def get(self, name: str) -> float | None:
        """Return a metric; None where it was not measured."""
        return self.metrics.get(name)

    def estimate(self, name: str) -> Mapping[str, Any] | None:
        """Return a perplexity with its errors, draws and sentences; None where it was not measured."""
        return self.estimates.get(name)


def is_latent(run: RunRecord) -> bool:
    """Tell whether the run is that of a latent job."""
    return run.config.get("task.type") == "latent"


def is_clusters(run: RunRecord) -> bool:
    """Tell whether the run is one of synthetic clusters."""
    return run.config.get("data.clusters") is not None


def row_name(config: Mapping[str, Any]) -> str:
    """Return what the paper calls a model of this (flat) configuration."""
    posterior, views = config["model.posterior"], config["objective.views"]
    if posterior in ("none", "point"):
        return {"none": "LSTM language model", "point": "AE"}[posterior]
    if posterior == "gaussian":
        if config["objective.svi_steps"]:
            return "SaVAE"
        if config["objective.aggressive_updates"]:
            return "LagVAE"
        if config["objective.beta"] == "cyclical":
            return "CycVAE"
        end = config["objective.beta_end"]
        return "VAE" if end == 1 else f"beta_{end:g} VAE"
    contrast = config["contrast.weight"] > 0
    name = "clVAE" if contrast and views == 2 else "iVAE"
    if config["critic.loss"] == "circle":
        name += "+"
    if config["objective.regularizer"] == "g":
        name += "_MI"
    if contrast and config["contrast.over"] == "h":
        name += " over h"
    if config["objective.swap"]:
        name += " swap"
    return name


def variant_of(config: Mapping[str, Any]) -> str:
    """List how a row differs from the released code: posterior, form of the circle loss, negatives, learning rate."""
    parts = []
    if config["model.posterior"] == "mlp" and config["data.clusters"] is None:  # of clusters it is the released one
        parts.append("mlp")
    if config["critic.loss"] == "circle" and config["critic.circle"] != "code":
        parts.append(config["critic.circle"])
    if config["contrast.weight"] > 0 and config["contrast.mask_duplicates"]:
        parts.append("duplicates masked")
    if config["schedule.type"] != "constant":
        parts.append(f"{config['schedule.type']} decay")
    return ", ".join(parts)


def cluster_label(config: Mapping[str, Any]) -> str:
    """Name a run of clusters, such as ``clVAE+ (duplicates masked, linear decay)``."""
    return _with_details(row_name(config), variant_of(config))


def _with_details(name: str, *details: str) -> str:
    joined = "; ".join(part for part in details if part)
    return f"{name} ({joined})" if joined else name


def dataset_of(config: Mapping[str, Any]) -> str:
    """Return ``ptb``, ``yahoo`` or ``yelp`` where ``data.path`` or ``data.train`` has it in its name, else nothing."""
    paths = " ".join(str(config.get(f"data.{key}") or "").lower() for key in ("path", "train"))
    return next((name for name in SENTENCES if re.search(rf"(?<![a-z]){name}(?![a-z])", paths)), "")


def text_rows(runs: Sequence[RunRecord]) -> list[ModelRow]:
    """Make the rows of the runs of text."""
    return [_model_row(run) for run in runs if is_latent(run) and not is_clusters(run)]


def _model_row(run: RunRecord) -> ModelRow:
    path = run.folder / EVALUATION.format(split="test")
    evaluation = _read_object(path)
    estimates: dict[str, Mapping[str, Any]] = {}
    if evaluation is None:
        metrics, measured = _best_validation(run)
    else:
        metrics = {key: float(value) for key, value in evaluation.items() if _is_metric(value)}
        for key, value in evaluation.items():
            if isinstance(value, dict) and _is_metric(value.get("value")):
                _check(_Estimate, value, f"{path}: {key}", run)
                estimates[key] = value
                metrics[key] = float(value["value"])
        draws = f", {evaluation.get('samples')} draws" if "kl_exact" in metrics or "kl_dual" in metrics else ""
        measured = f"test{draws}, {_step_of(str(evaluation.get('checkpoint')))}"
    generated = _read_object(run.folder / GENERATED_TEXT) or {}
    _check(_Generated, generated, str(run.folder / GENERATED_TEXT), run)
    config = run.config
    measured = f"{measured}, seed {config.get('run.seed', '?')}"
    return ModelRow(
        row_name(config), variant_of(config), dataset_of(config), run, metrics, measured, generated, estimates
    )


def _check(kind: type[Record], content: Mapping[str, Any], source: str, run: RunRecord) -> None:
    """Raise ``DataError`` for a result that lacks a part or has another in its place."""
    parse_record(kind, content, source, f"; capt evaluate {quoted(run.folder)} measures it again", error=DataError)


def _is_metric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def _step_of(checkpoint: str) -> str:
    digits = Path(checkpoint).name.removeprefix("step-")
    return f"step {int(digits):,}" if digits.isdecimal() else checkpoint


def _best_validation(run: RunRecord) -> tuple[dict[str, float], str]:
    """Choose the validation of the run's best checkpoint (``checkpoint.best``), else that of the lowest loss."""
    key = run.config.get("checkpoint.best") or "loss"
    sign = -1 if run.config.get("checkpoint.best") and run.config.get("checkpoint.best_mode") == "max" else 1
    rows = [row for row in run.validation if math.isfinite(row.figures.get(key, math.nan))]
    if not rows:
        return {}, "not measured"
    best = min(rows, key=lambda row: sign * row.figures[key])
    return best.figures, f"validation, 1 draw, step {best.step:,}"


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        value = read_json(path)
    except (DataError, FileNotFoundError):
        return None
    return value if isinstance(value, dict) else None
