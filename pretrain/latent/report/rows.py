"""A run as a row of the paper's tables: which row it is, and what was measured of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.base.errors import DataError
from pretrain.base.files import read_json
from pretrain.latent.artifacts import EVALUATION, GENERATED_TEXT
from pretrain.latent.report.published import PUBLISHED, SENTENCES
from pretrain.report.runs import RunRecord


@dataclass(frozen=True)
class Row:
    """A run of text. ``figures`` are those of ``capt evaluate`` on the test text, else of the best validation.

    ``name`` is what the paper calls it, ``variant`` what sets it apart from the released code.
    """

    name: str
    variant: str
    dataset: str
    run: RunRecord
    figures: Mapping[str, float]
    measured: str
    generated: Mapping[str, float]

    @property
    def label(self) -> str:
        """``clVAE+ (mlp, mean_inside; ptb)``."""
        return _titled(self.name, self.variant, self.dataset)

    @property
    def text(self) -> str:
        """The paper's text that was measured: ``ptb``, ``yahoo``, ``yelp``; nothing where it has another size."""
        return self.dataset if self.get("sentences") in SENTENCES.get(self.dataset, ()) else ""

    @property
    def published(self) -> tuple[float, float, float, float, int] | None:
        """-ELBO, PPL, KL, MI, AU of the paper, where it has this row on this text."""
        return PUBLISHED.get(self.text, {}).get(self.name)

    def get(self, name: str) -> float | None:
        """A figure; None where it was not measured."""
        return self.figures.get(name)

    @property
    def weighted(self) -> tuple[float, int] | None:
        """Perplexity by importance weighting, and the number of draws."""
        found = ((key, value) for key, value in self.figures.items() if key.startswith("ppl_iw"))
        return next(((value, int(key.removeprefix("ppl_iw"))) for key, value in found), None)


def is_latent(run: RunRecord) -> bool:
    """Whether the run is one of this family."""
    return run.config.get("task.type") == "latent"


def is_clusters(run: RunRecord) -> bool:
    """Whether it is one of synthetic clusters."""
    return run.config.get("data.clusters") is not None


def row_name(config: Mapping[str, Any]) -> str:
    """What the paper calls a model of this (flat) configuration."""
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
    """In what a row differs from the released code: posterior, form of the circle loss, negatives, learning rate."""
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
    """``clVAE+ (duplicates masked, linear decay)``."""
    return _titled(row_name(config), variant_of(config))


def _titled(name: str, *inside: str) -> str:
    named = "; ".join(part for part in inside if part)
    return f"{name} ({named})" if named else name


def dataset_of(config: Mapping[str, Any]) -> str:
    """``ptb``, ``yahoo`` or ``yelp`` where ``data.path`` or ``data.train`` has it in its name; else nothing."""
    paths = " ".join(str(config.get(f"data.{key}") or "").lower() for key in ("path", "train"))
    return next((name for name in SENTENCES if re.search(rf"(?<![a-z]){name}(?![a-z])", paths)), "")


def text_rows(runs: Sequence[RunRecord]) -> list[Row]:
    """The runs of text, as rows."""
    return [_row(run) for run in runs if is_latent(run) and not is_clusters(run)]


def _row(run: RunRecord) -> Row:
    evaluation = _json(run.folder / EVALUATION.format(split="test"))
    if evaluation is None:
        figures, measured = _best_validation(run)
    else:
        figures = {key: float(value) for key, value in evaluation.items() if _is_figure(value)}
        draws = f", {evaluation.get('samples')} draws" if "kl_exact" in figures or "kl_dual" in figures else ""
        measured = f"test{draws}, {_step_of(str(evaluation.get('checkpoint')))}"
    generated = _json(run.folder / GENERATED_TEXT) or {}
    config = run.config
    measured = f"{measured}, seed {config.get('run.seed', '?')}"
    return Row(row_name(config), variant_of(config), dataset_of(config), run, figures, measured, generated)


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def _step_of(checkpoint: str) -> str:
    digits = Path(checkpoint).name.removeprefix("step-")
    return f"step {int(digits):,}" if digits.isdigit() else checkpoint


def _best_validation(run: RunRecord) -> tuple[dict[str, float], str]:
    """The validation whose checkpoint the run keeps as its best (``checkpoint.best``), else that of the lowest loss."""
    key = run.config.get("checkpoint.best") or "loss"
    sign = -1 if run.config.get("checkpoint.best") and run.config.get("checkpoint.best_mode") == "max" else 1
    rows = [row for row in run.validation if math.isfinite(row.figures.get(key, math.nan))]
    if not rows:
        return {}, "not measured"
    best = min(rows, key=lambda row: sign * row.figures[key])
    return best.figures, f"validation, 1 draw, step {best.step:,}"


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = read_json(path)
    except (DataError, FileNotFoundError):
        return None
    return value if isinstance(value, dict) else None
