"""The bottleneck over ranks: gradients are those of a literal loop in float64 for any ranks, stages, micro-batches.

Documents are of one word, of a few and of more than a window, so that ranks have unlike numbers of texts and words.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.config.load import job_from_mapping
from tests.bottleneck import literal_losses, ragged_mapping
from tests.gradients import gradients, relative
from tests.support import run_ranks

_GLOBAL = 10
_CASES: dict[str, dict[str, Any]] = {
    "both": {"bottleneck": {"head": "both", "bow_weight": 0.7}, "model": {"pooling": "mean"}},
    "own matrix": {
        "bottleneck": {"head": "bow", "bow_matrix": "own", "pooling": "mean"},
        "data": {"cross_document_attention": False},
    },
    "decoder": {
        "bottleneck": {"head": "decoder", "decoder_rate": 0.3, "decoder_weight": 2.0},
        "data": {"cross_document_attention": False},
        "model": {"pooling": "cls"},
    },
}
_CUTS = ((1, 0, 10), (1, 0, 3), (2, 3, 2), (4, 2, 2), (4, 1, 3))
"""Ranks, ZeRO stage, and the most windows of a rank's micro-batch: four ranks cannot share ten windows evenly."""


def _mapping(folder: Path, case: str, stage: int, micro: int, **changes: Any) -> dict[str, Any]:
    mapping = ragged_mapping(
        folder,
        batch={"global": _GLOBAL, "micro": micro},
        engine={"zero_stage": stage, "precision": "fp32"},
        optimizer={"lr": 1e-9},
        model={"initializer_range": 0.2, **_CASES[case].get("model", {})},
        contrast={"weight": 0.0, "queue": 0},
    )
    for name, value in {**_CASES[case], **changes}.items():
        mapping[name] = {**mapping.get(name, {}), **value}
    return mapping


def _first_steps(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [gradients(mapping, steps=1) for mapping in mappings]


def _literals(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_literal(mapping) for mapping in mappings]


def _literal(mapping: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient of the first step in float64, by `literal_losses`."""
    job: Any = job_from_mapping(mapping, "test")
    task = importlib.import_module("capt.pretrain.language.task").TASK(job, Path(mapping["run"]["dir"]))
    module = task.build_modules()["model"].double().eval()
    batch = task.micro_batch(task.assembler("train"), np.arange(_GLOBAL), 0)
    losses = literal_losses(module, batch, job.bottleneck, job.bottleneck.pooling or job.model.pooling)
    weights = {"mlm": 1.0, "bow": job.bottleneck.bow_weight, "decoder": job.bottleneck.decoder_weight}
    sum(weights[name] * loss for name, loss in losses.items()).backward()  # type: ignore[union-attr]
    texts = [len(set(row) - {-1}) for row in batch.numbers.tolist()]
    assert len(set(texts)) > 1, "windows are to have unlike numbers of texts"
    held = np.stack([np.bincount(a[w >= 0], minlength=9) for a, w in zip(batch.numbers, batch.words, strict=True)])
    assert (held == 1).any(), "a text of one word is to be among them"
    named = {name: p.grad for name, p in module.named_parameters()}
    assert all(grad is not None for name, grad in named.items()), named.keys()
    return {
        "gradients": {name: grad.numpy() for name, grad in named.items() if grad is not None},
        "losses": {f"loss/{name}": loss.item() for name, loss in losses.items()},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bottleneck")


def test_gradients_are_those_of_a_literal_loop(folder: Path) -> None:
    (literals,) = run_ranks(_literals, 1, [_mapping(folder, case, 0, _GLOBAL) for case in _CASES])
    for world in (1, 2, 4):
        keys = [(case, stage, micro) for ranks, stage, micro in _CUTS if ranks == world for case in _CASES]
        ranks = run_ranks(_first_steps, world, [_mapping(folder, *key) for key in keys])
        for number, key in enumerate(keys):
            literal = literals[list(_CASES).index(key[0])]
            for name, value in literal["losses"].items():
                mean = np.mean([rank[number]["losses"][0][name] for rank in ranks])
                assert mean == pytest.approx(value, rel=1e-5), (world, key, name)
            found = ranks[0][number]["gradients"][0]
            assert found.keys() == literal["gradients"].keys()
            assert relative(found, literal["gradients"]) < 1e-5, (world, key)
            heads = [{k: g for k, g in each.items() if "bottleneck" in k} for each in (found, literal["gradients"])]
            assert relative(*heads) < 1e-5, (world, key)
