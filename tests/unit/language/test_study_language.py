"""The language study: what is read of a run, and the tables of made-up trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.studies.language import REFERENCE, STEPS, VARIANTS, variants
from tests.studies.language_tables import ELSEWHERE, PAIRS, Trial, differences_table, trial_of, variants_table


def run(folder: Path, loss: float, head: bool) -> Path:
    """A finished and measured run: with a head that of CAPT, without one MLM alone."""
    folder.mkdir()
    figures: dict[str, Any] = {"loss/mlm": loss, "accuracy/mlm": 0.1, "noise/cls/top1": 0.2, "noise/mean/top1": 0.3}
    figures |= {"noise/mean/drift": 0.4, **({"retrieval/to_corrupted": 1.0} if head else {})}
    rows = [{"step": step, "tokens": step * 4096, "seconds_per_step": 0.1} for step in (10, 20)]
    rows += [
        {"step": step, "tokens": step * 4096, "split": "validation", **figures, "loss/mlm": loss + (step == 10)}
        for step in (10, 20)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    poolers = {name: {"spearman": 0.5, "top1": 0.6} for name in ("cls", "mean", *(["head"] if head else []))}
    sections = [
        {"name": "wiki.valid.tokens, 15% masked", "metrics": {"loss/mlm": 7.0}, "poolers": poolers},
        {"name": "wiki.valid.tokens, 30% masked", "metrics": {"loss/mlm": 9.0}, "poolers": poolers},
        *({"name": f"STS-B {split}", "poolers": poolers} for split in ("dev", "test")),
    ]
    (folder / "evaluation.json").write_text(json.dumps({"sections": sections}))
    return folder


@pytest.fixture
def trials(tmp_path: Path) -> list[Trial]:
    losses = {("capt-queue", 1): 6.0, ("capt-queue", 2): 6.2, ("mlm", 1): 6.5, ("mlm", 2): 6.3, ("none", 1): 8.3}
    return [
        trial_of(run(tmp_path / f"{variant}-{seed}", loss, variant == "capt-queue"), variant, seed)
        for (variant, seed), loss in losses.items()
    ]


def test_a_run_is_read_at_its_last_validation(trials: list[Trial]) -> None:
    first, mlm, none = trials[0], trials[2], trials[-1]
    assert (first.steps, first.million_tokens, first.seconds) == (20, 0.08192, 2.0)
    assert (first.loss, first.retrieval, first.wiki_loss, first.sts_test_head, first.own_head) == (6, 1, 7, 50, 0.6)
    assert (mlm.retrieval, mlm.sts_dev_head, mlm.own_head) == (None, None, None)
    assert (none.steps, none.seconds) == (0, 0), "its one step moves nothing"


def test_tables(trials: list[Trial]) -> None:
    rows = variants_table(trials, ["steps", "loss", "retrieval"]).splitlines()
    assert rows[2] == "| capt-queue | 20 | 6.100 ± 0.141 | 1.000 ± 0.000 |"
    assert rows[3] == "| mlm | 20 | 6.400 ± 0.141 |  |"
    assert variants_table(trials, ELSEWHERE).splitlines()[3].count("|") == len(ELSEWHERE) + 2
    loss = [row for row in differences_table(trials).splitlines() if row.startswith("| loss/mlm")]
    assert loss == [
        "| loss/mlm | capt-queue - mlm (equal tokens) | -0.300 | -0.500 to -0.100 | 0 of 2 | 0.500 |",
        "| loss/mlm | mlm - none | -1.800 | none | 0 of 1 | 1.000 |",
        "| loss/mlm | capt-queue - none | -2.300 | none | 0 of 1 | 1.000 |",
    ]


def test_every_compared_variant_is_run() -> None:
    assert {variant for first, second, _ in PAIRS for variant in (first, second)} <= set(VARIANTS)
    assert VARIANTS[:2] == (REFERENCE, "mlm"), "the first two runs stand side by side"
    assert "contrast.queue_start=100" in variants(STEPS)[REFERENCE]
