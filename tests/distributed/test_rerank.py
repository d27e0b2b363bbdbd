"""Rerankers over ranks: gradients are those of a literal loop in float64 for any ranks, stages and micro-batches.

Queries have 1 to 31 negatives, so that ranks have unlike numbers of them, and one has none where the loss takes it;
small micro-batches take two passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capt.finetune.order import ExampleOrder
from capt.finetune.rerank.losses import LOSSES
from capt.finetune.rerank.task import RerankTraining
from capt.pretrain.config.load import job_from_mapping
from tests.finetune import write_encoder
from tests.gradients import gradients, relative
from tests.rerank import literal_loss, ragged_rows, write_rows
from tests.support import run_ranks

_GLOBAL = 9
_CUTS = ((1, 0, 100_000), (1, 0, 300), (2, 3, 1_000), (2, 1, 2_100), (4, 2, 2_100), (4, 0, 90))
"""Ranks, ZeRO stage, and tokens of a micro-batch: 32 pairs of 64 are 2,048, so that fewer mean two passes.

On two ranks and on four every other loss meets the first cut, and those between the second.
"""


def _mapping(folder: Path, kind: str, stage: int = 0, tokens: int = 100_000) -> dict[str, Any]:
    return {
        "task": {"type": "rerank"},
        "run": {"dir": str(folder / "run"), "tensorboard": False, "threads": 1},
        "data": {
            "train": str(folder / "pairs.jsonl"), "cache": str(folder / "cache"), "negatives": 32,
            "validation_fraction": 0.0, "shuffle": False,
        },
        "model": {"init": str(folder / "encoder"), "dropout": 0.0, "attention_dropout": 0.0},
        "batch": {"global": _GLOBAL, "micro_tokens": tokens},
        "loss": {"type": kind, **({"temperature": 0.7} if LOSSES[kind].scaled else {})},
        "schedule": {"epochs": None, "max_steps": 3, "warmup_steps": 0, "warmup_ratio": None},
        "optimizer": {"lr": 1e-9, "clip": 0.0},
        "engine": {"zero_stage": stage, "precision": "fp32"},
        "validate": {"per_epoch": None, "every": 0},
        "checkpoint": {"best": None},
    }  # fmt: skip


def _literal(mapping: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient of the first step in float64: each pair by itself, query by query."""
    job: Any = job_from_mapping(mapping, "test")
    task: Any = RerankTraining(job, Path(mapping["run"]["dir"]))
    module = task.build_modules()["model"].double().eval()
    rows = ExampleOrder(task.train.lengths, _GLOBAL, job.run.seed, shuffle=False).rows(0)
    sizes, total = [], torch.zeros((), dtype=torch.float64)
    for row in rows.tolist():
        drawn = task.train.draw(np.array([row]), np.zeros(1, dtype=np.int64))
        scores = [module(*task.train.inputs(drawn.take(np.array([i]))))[0, 0] for i in range(len(drawn))]
        # The head gives fp32, whose gradients are of fp32 as well.
        s, t = torch.stack(scores).double(), torch.from_numpy(drawn.teacher)
        total = total + literal_loss(job.loss.type, s, t, drawn.positive.tolist(), job.loss.temperature) / _GLOBAL
        sizes.append(len(drawn))
    assert {2, 32} <= set(sizes)
    assert (1 in sizes) != ("negative" in LOSSES[job.loss.type].needs)
    total.backward()
    named = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    return {"gradients": named, "loss": total.item()}


def _literals(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_literal(mapping) for mapping in mappings]


def _first_steps(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [gradients(mapping, steps=1) for mapping in mappings]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("rerank")
    alone = {"query": "alone", "pos": ["a river"], "neg": [], "pos_scores": [1.0], "neg_scores": []}
    write_rows(found / "pairs.jsonl", [alone, *ragged_rows(_GLOBAL, 31)])
    write_encoder(found / "encoder")
    return found


@pytest.fixture(scope="module")
def literals(folder: Path) -> list[dict[str, Any]]:
    (found,) = run_ranks(_literals, 1, [_mapping(folder, kind) for kind in LOSSES])
    return found


@pytest.mark.parametrize(("world", "stage", "tokens"), _CUTS)
def test_gradients_are_those_of_a_literal_loop(
    folder: Path, literals: list[dict[str, Any]], world: int, stage: int, tokens: int
) -> None:
    cut = _CUTS.index((world, stage, tokens))
    kinds = [kind for number, kind in enumerate(LOSSES) if world == 1 or number % 2 == cut % 2]
    ranks = run_ranks(_first_steps, world, [_mapping(folder, kind, stage, tokens) for kind in kinds])
    for number, kind in enumerate(kinds):
        expected = literals[list(LOSSES).index(kind)]
        losses = [rank[number]["losses"][0]["loss"] for rank in ranks]
        assert np.mean(losses) == pytest.approx(expected["loss"], rel=1e-5), kind
        (found,) = ranks[0][number]["gradients"]
        found = {name: grad for name, grad in found.items() if name in expected["gradients"]}
        assert found.keys() == expected["gradients"].keys()
        assert relative(found, expected["gradients"]) < 2e-5, kind
