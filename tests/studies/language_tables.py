"""The tables of docs/results/language.md: variants over their seeds, and paired differences over the seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.runs import rows_of
from tests.studies.seeds import STATISTICS, paired, spread
from tests.studies.support import table, usual

PAIRS = (
    ("capt-queue", "mlm", "equal tokens"),
    ("capt-no-queue", "mlm", "equal tokens"),
    ("capt-queue", "mlm-equal-compute", "equal compute"),
    ("capt-no-queue", "mlm-equal-compute", "at most equal compute"),
    ("capt-queue", "capt-no-queue", "the queue"),
    ("capt-queue", "capt-queue-constant", "the temperature"),
    ("capt-no-queue", "capt-no-queue-constant", "the temperature"),
    ("mlm", "none", ""),
    ("capt-queue", "none", ""),
)
POOLERS = ("cls", "mean", "head")


class Trial(NamedTuple):
    """A run. Of the held-out books: losses, accuracy, retrieval, and how little the vectors move under noise.

    ``wiki_loss`` is the MLM loss on WikiText-2 with 15% masked, ``sts_*`` Spearman's rho x 100 on STS-B, ``own_*`` the
    share of WikiText-2 windows whose own corruption is the nearest of all. What a variant lacks is None: MLM alone has
    no contrast and no head.
    """

    variant: str
    seed: int
    steps: int
    million_tokens: float
    seconds: float
    loss: float
    accuracy: float
    retrieval: float | None
    alignment: float | None
    uniformity: float | None
    noise_cls: float
    noise_mean: float
    drift_mean: float
    wiki_loss: float
    sts_dev_cls: float
    sts_dev_mean: float
    sts_dev_head: float | None
    sts_test_cls: float
    sts_test_mean: float
    sts_test_head: float | None
    own_cls: float
    own_mean: float
    own_head: float | None


METRICS: Mapping[str, str] = {
    "loss": "loss/mlm",
    "accuracy": "accuracy/mlm",
    "retrieval": "retrieval/to_corrupted",
    "alignment": "alignment",
    "uniformity": "uniformity",
    "noise_cls": "noise/cls/top1",
    "noise_mean": "noise/mean/top1",
    "drift_mean": "noise/mean/drift",
}
"""Field of `Trial` -> the validation's name for it."""
ELSEWHERE = ("wiki_loss", *(f"{what}_{pooler}" for what in ("sts_dev", "sts_test", "own") for pooler in POOLERS))
COMPARED = {
    "loss": 3, "accuracy": 4, "noise_mean": 3, "drift_mean": 3, "wiki_loss": 3, "sts_test_cls": 1, "sts_test_mean": 1,
}  # fmt: skip
"""The fields of the differences, with their decimals."""


def trial_of(run: Path, variant: str, seed: int) -> Trial:
    """Results of a finished and measured run; random weights count as no step."""
    rows = rows_of(run)
    last = [row for row in rows if row.get("split") == "validation"][-1]
    steps, tokens = (0, 0) if variant == "none" else (last["step"], last["tokens"])
    sections = {part["name"]: part for part in json.loads((run / "evaluation.json").read_text())["sections"]}
    wiki = sections["wiki.valid.tokens, 15% masked"]
    sts = {split: sections[f"STS-B {split}"]["poolers"] for split in ("dev", "test")}
    return Trial(
        variant, seed, steps, tokens / 1e6, round(steps * usual(run, "seconds_per_step"), 1),
        *(last.get(name) for name in METRICS.values()),
        wiki["metrics"]["loss/mlm"],
        *(_scaled(sts[split], pooler, "spearman", 100) for split in sts for pooler in POOLERS),
        *(_scaled(wiki["poolers"], pooler, "top1", 1) for pooler in POOLERS),
    )  # fmt: skip


def write_tables(trials: Sequence[Trial], out: Path) -> None:
    """Write the tables as Markdown."""
    parts = [
        variants_table(trials, ["steps", "million_tokens", "seconds", *METRICS]), variants_table(trials, ELSEWHERE),
        differences_table(trials),
    ]  # fmt: skip
    out.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def variants_table(trials: Sequence[Trial], fields: Sequence[str]) -> str:
    """Mean ± deviation over the seeds of some fields; empty where a variant lacks one."""
    rows = []
    for variant in dict.fromkeys(trial.variant for trial in trials):
        own = [trial for trial in trials if trial.variant == variant]
        cells = []
        for field in fields:
            values = [value for trial in own if (value := getattr(trial, field)) is not None]
            digits = {"steps": 0, "seconds": 0, "million_tokens": 2}.get(field, 1 if field.startswith("sts") else 3)
            if field in ("steps", "million_tokens"):  # the same for all seeds
                values = values[:1]
            cells.append(spread(values, digits=digits) if values else "")
        rows.append([variant, *cells])
    return table(["variant", *map(_head, fields)], rows)


def differences_table(trials: Sequence[Trial]) -> str:
    """Paired differences over the seeds."""
    rows = []
    for field, digits in COMPARED.items():
        for first, second, what in PAIRS:
            scores = [
                {trial.seed: getattr(trial, field) for trial in trials if trial.variant == variant}
                for variant in (first, second)
            ]
            result = paired(*scores)
            if result is not None:
                note = f" ({what})" if what else ""
                rows.append([_head(field), f"{first} - {second}{note}", *result.cells(digits)])
    return table(["metric", "difference", "mean", *STATISTICS], rows)


def _head(field: str) -> str:
    return METRICS.get(field, field.replace("_", " "))


def _scaled(poolers: Mapping[str, Mapping[str, float]], pooler: str, name: str, factor: float) -> float | None:
    return factor * poolers[pooler][name] if pooler in poolers else None
