"""The tables of the paper (Contrastive Latent Variable Models for Neural Text Generation, UAI 2022), as printed.

Columns of :data:`PUBLISHED`: -ELBO, PPL, KL, MI, AU. For implicit rows (iVAE, clVAE) all but AU come from dual
estimates, which bound nothing; for Gaussian rows of Yahoo and Yelp -ELBO is an importance-weighted likelihood.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from capt.pretrain.base.errors import DataError, quoted
from capt.pretrain.base.files import read_json
from capt.pretrain.base.records import Count, Record, parse_record
from capt.pretrain.latent.config import EVALUATION, GENERATED_TEXT
from capt.pretrain.report.document import Table, number
from capt.pretrain.report.runs import RunRecord

PUBLISHED: dict[str, dict[str, tuple[float, float, float, float, int]]] = {
    "ptb": {  # Tables 1, 3 (over h) and 7 (swap)
        "VAE": (102.6, 108.26, 1.08, 0.8, 2),
        "beta_0.5 VAE": (104.5, 117.92, 7.50, 3.1, 5),
        "SaVAE": (102.6, 107.71, 1.23, 0.7, 2),
        "CycVAE": (103.1, 110.50, 3.48, 1.8, 5),
        "iVAE": (87.6, 54.46, 6.32, 3.5, 32),
        "iVAE_MI": (87.2, 53.44, 12.51, 12.2, 32),
        "clVAE": (82.7, 43.51, 8.37, 5.55, 32),
        "clVAE_MI": (82.7, 43.49, 13.95, 13.69, 32),
        "clVAE+": (79.8, 38.04, 7.01, 4.72, 32),
        "clVAE+_MI": (77.7, 34.61, 9.94, 9.58, 32),
        "clVAE over h": (83.0, 44.10, 7.51, 4.92, 32),
        "clVAE_MI over h": (86.7, 52.13, 13.35, 13.09, 32),
        "clVAE+_MI swap": (79.1, 36.96, 9.21, 8.95, 32),
    },
    "yahoo": {  # Table 2
        "VAE": (328.6, 61.21, 0.0, 0.0, 0),
        "beta_0.4 VAE": (328.7, 61.29, 6.3, 2.8, 8),
        "SaVAE": (327.2, 60.15, 5.2, 2.7, 10),
        "LagVAE": (326.7, 59.77, 5.7, 2.9, 15),
        "iVAE": (309.5, 48.22, 8.0, 4.4, 32),
        "iVAE_MI": (309.1, 47.93, 11.4, 10.7, 32),
        "clVAE+_MI": (303.3, 44.61, 8.6, 7.7, 32),
    },
    "yelp": {  # Table 2
        "VAE": (357.9, 40.56, 0.0, 0.0, 0),
        "beta_0.4 VAE": (358.2, 40.69, 4.2, 2.0, 4),
        "SaVAE": (355.9, 39.73, 2.8, 1.7, 8),
        "LagVAE": (355.9, 39.73, 3.8, 2.4, 11),
        "iVAE": (348.2, 36.70, 7.6, 4.6, 32),
        "iVAE_MI": (348.7, 36.88, 11.6, 11.0, 32),
        "clVAE+_MI": (343.6, 34.97, 8.8, 8.2, 32),
    },
}

SENTENCES: dict[str, tuple[int, ...]] = {"ptb": (3_761, 3_370), "yahoo": (10_000,), "yelp": (10_000,)}
"""The sentences of the test and of the validation text. A text of another size is not the paper's."""

GENERATED: dict[str, tuple[int, int]] = {  # Table 4, PTB: forward and reverse perplexity
    "VAE": (18_494, 10_149),
    "CycVAE": (3_390, 5_587),
    "AE": (672, 2_589),
    "beta_0 VAE": (625, 1_897),
    "beta_0.5 VAE": (939, 4_078),
    "SaVAE": (341, 10_651),
    "iVAE": (116, 1_520),
    "iVAE_MI": (134, 1_137),
    "clVAE+_MI": (120, 1_047),
}


# Runs of text as rows of the paper's tables: the name of the row, and the metrics of the run.


class _Estimate(Record):
    """The part of a perplexity with its errors that the tables read."""

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
    """The part of the perplexities of generated text that the tables read."""

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

    def printed(self, name: str) -> float | None:
        """Return the paper's ``nelbo``, ``ppl``, ``kl``, ``mi`` or ``au``, where it has this row on this text."""
        row = PUBLISHED.get(self.text, {}).get(self.name)
        return row[("nelbo", "ppl", "kl", "mi", "au").index(name)] if row else None

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
    """List how a row differs from the released code: posterior, critics, negatives, learning rate."""
    parts = []
    if config["model.posterior"] == "mlp" and config["data.clusters"] is None:  # of clusters it is the released one
        parts.append("mlp")
    if config["critic.loss"] == "circle" and config["critic.circle"] != "code":
        parts.append(config["critic.circle"])
    if config["objective.critic_term"] != "mean":
        parts.append(f"encoder {config['objective.critic_term']}")
    if config["contrast.weight"] > 0 and config["contrast.negatives"] == "own_view":
        parts.append("negatives of the own view")
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
        # A number is a metric; an object with a ``value`` is an estimate with its errors.
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


# The tables of likelihoods, of the latent code and of generated text, with the paper's numbers beside ours.


BOUND_REMARK = (
    "-ELBO and PPL 'dual' are the paper's columns: reconstruction plus the Fenchel dual of the KL. The dual is a lower "
    "bound on the KL for any critic, so this sum is below -ELBO, and it bounds -log p(x) on no side. All other "
    "perplexities are upper bounds (the language model's is exact). 'Exact KL' and 'q' measure how well the encoder's "
    "Gaussian fits the decoder, not the model: where it fits badly they are loose by orders of magnitude. A comparison "
    "of models takes 'best', the tightest bound for the text as a whole, and even that is an upper bound. ± is the "
    "standard error over sentences (delta method); two models on the same sentences differ by less. "
    "Rows that say 'validation' wait for capt evaluate RUN."
)
CODE_REMARK = (
    "MI batch is at most the log of the batch, MI aggregate at most the log of the sentences it is over. AU counts the "
    "dimensions whose exact posterior mean varies by more than 0.01; 'sampled' is the released rule, which also counts "
    "collapsed dimensions of a wide posterior."
)


def likelihood_table(rows: Sequence[ModelRow]) -> Table:
    """Write -ELBO and PPL of Tables 1 to 3 and 7: as published, by the dual as in the paper, by the tightest bound."""
    return Table.of(
        (
            {
                "model": row.label,
                "epochs": "" if (epochs := row.run.config.get("schedule.epochs")) is None else f"{epochs:g}",
                "measured on": row.measured,
                "-ELBO published": number(row.printed("nelbo"), 1),
                "PPL published": number(row.printed("ppl"), 2),
                **{column: number(row.get(name), 1) for column, name in _LIKELIHOODS.items()},
                "-log p(x), best bound": number((row.estimate("ppl_best") or {}).get("nats"), 1),
                "PPL, best bound": _estimate(row, "ppl_best"),
                "by, of sentences": _proposal(row.estimate("ppl_best") or {}),
            }
            for row in rows
        ),
        always=1,
    )


def bounds_table(rows: Sequence[ModelRow]) -> Table:
    """Write the perplexity by every valid bound, with its standard error, draws and sentences, and the bridge."""
    cells = []
    for row in rows:
        weighted = [found for name in _WEIGHTED if (found := row.estimate(name)) is not None]
        bridge = row.estimate("bridge") or {}
        gap, error = (bridge.get(f"tightest_minus_bridge{end}") for end in ("", "_standard_error"))
        cells.append(
            {
                "model": row.label,
                "PPL, exact KL": _estimate(row, "ppl_exact") or number(row.get("ppl_exact"), 1),
                "the same, weighted sentences": _estimate(row, "ppl_exact_there"),
                **{f"PPL, {proposal}": _estimate(row, name) for name, proposal in _WEIGHTED.items()},
                # One number where all proposals have the same, else each of them.
                **{key: "; ".join(dict.fromkeys(f"{of[key]:,}" for of in weighted)) for key in ("draws", "sentences")},
                "bridge: sentences, PPL": f"{bridge['sentences']:,}, {_estimate(row, 'bridge')}" if bridge else "",
                "best bound there": number(bridge.get("ppl_best_there"), 1),
                "best minus bridge, nats": number(gap, 2) + (f" ± {error:.2f}" if error else ""),
            }
        )
    return Table.of(cells, always=1)


_LIKELIHOODS = {"-ELBO dual": "nelbo_dual", "PPL dual": "ppl_dual", "reconstruction": "rec"}
_CODES = {
    "KL dual": "kl_dual", "KL exact": "kl_exact", "MI dual": "mi_dual", "MI batch": "mi_batch",
    "MI aggregate": "mi_aggregate", "AU": "au", "AU sampled": "au_sampled",
}  # fmt: skip
_GENERATED_TEXT = {
    "forward": "forward_ppl", "reverse (training text)": "reverse_train_ppl", "reverse (test text)": "reverse_test_ppl",
}  # fmt: skip
"""Columns, and the metric of each."""
_WEIGHTED = {"ppl_iw_q": "q", "ppl_iw_prior": "prior", "ppl_iw_mixture": "q and prior", "ppl_iw_refitted": "refitted"}
"""The importance-weighted perplexities, and what proposes."""


def _proposal(best: Mapping[str, Any]) -> str:
    name = best.get("proposal")
    if name is None:
        return ""
    proposal = "exact KL" if name == "exact" else _WEIGHTED[f"ppl_iw_{name}"]
    return f"{proposal}, {best['sentences']:,}"


def _estimate(row: ModelRow, name: str) -> str:
    found = row.estimate(name)
    if found is None:
        return ""
    error = found.get("standard_error")
    return f"{found['value']:,.1f}" + ("" if error is None else f" ± {error:,.1f}")


def code_table(rows: Sequence[ModelRow]) -> Table:
    """Write KL, MI and AU of Tables 1 to 3 and 7."""
    return Table.of(
        (
            {
                "model": row.label,
                **{
                    f"{name.upper()} published": number(row.printed(name), _decimals(name))
                    for name in ("kl", "mi", "au")
                },
                **{column: number(row.get(name), _decimals(name)) for column, name in _CODES.items()},
            }
            for row in rows
        ),
        always=1,
    )


def _decimals(name: str) -> int:
    return 0 if name.startswith("au") else 2  # a number of dimensions, or nats


def generated_table(rows: Sequence[ModelRow]) -> Table:
    """Write forward and reverse perplexity of sampled sentences (Table 4), for the rows where they were measured."""
    cells = []
    for row in rows:
        if row.generated:
            forward, reverse = GENERATED.get(row.name, (None, None)) if row.text == "ptb" else (None, None)
            cells.append(
                {
                    "model": row.label,
                    "forward published": number(forward, 0),
                    "reverse published": number(reverse, 0),
                    **{column: number(row.generated.get(name), 0) for column, name in _GENERATED_TEXT.items()},
                    "sentences, by": f"{row.generated.get('number', 0):,}, {row.generated.get('by', '')}",
                }
            )
    return Table.of(cells, always=1)
