"""Gradients of crops with masks in both views: a literal float64 loop on 1, 2 and 4 ranks that share unevenly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from capt.pretrain.config.load import job_from_mapping
from tests.gradients import gradients, relative
from tests.language import language_mapping, write_corpus
from tests.support import run_ranks

BATCH = 9
"""Samples of a step: 2 and 4 ranks cannot share them evenly."""


def _mapping(folder: Path, world: int, **changes: Any) -> dict[str, Any]:
    if not (folder / "text.txt").exists():
        write_corpus(folder / "text.txt", 12)
    mapping = language_mapping(
        folder, batch={"global": BATCH, "micro": 3 if world == 1 else 2}, optimizer={"lr": 1e-9, "clip": 0.0},
        model={"initializer_range": 0.2, "pooling": "mean"}, mlm={"views": "both", "weight": 0.7},
        contrast={"queue": 0, "temperature": {"type": "constant", "value": 0.2}},
        engine={"zero_stage": (0, 1, 3)[world // 2]},
    )  # fmt: skip
    # Few documents, so that a step holds several runs of one, which are no negatives of each other.
    mapping["data"] |= {
        "validation_fraction": 0.0,
        "view": "crop",
        "passage": 40,
        "apart": 1000,
        "spans": {"share": [0.3, 0.6]},
        **changes,
    }
    return mapping


def _literal(mapping: dict[str, Any]) -> dict[str, np.ndarray]:
    """The gradient of the first step: every view encoded by itself, without padding, one term after the other."""
    from capt.pretrain.base import distributed
    from capt.pretrain.language.task import LanguageTask

    distributed.device()
    job = job_from_mapping(mapping, "test")
    task = LanguageTask(job, Path(mapping["run"]["dir"]))
    model = task.build_modules()["model"].double().capt
    batch = task.micro_batch(task.assembler("train"), np.arange(BATCH), 0)
    assert batch.instances is not None
    n, pad = BATCH, task.model_config.pad_id
    views, losses, count = [], [], 0
    for row, tokens in enumerate([*batch.tokens, *batch.corrupted]):
        text = tokens[tokens != pad][None]
        hidden = model.encoder(text, padded=False)[0]
        views.append(model.aggregation(hidden.mean(0, keepdim=True))[0].double())
        used = batch.labels[row] != -100
        labels = batch.labels[row][used]
        logits = model.mlm.logits(hidden[batch.positions[row][used]])
        losses.append(cross_entropy(logits, labels, reduction="sum"))
        count += len(labels)
    contrast = []
    instances = batch.instances.tolist() * 2
    left_out = 0
    for i in range(2 * n):
        positive = (i + n) % (2 * n)
        others = [j for j in range(2 * n) if j not in (i, positive) and instances[j] != instances[i]]
        left_out += 2 * n - 2 - len(others)
        keys = torch.stack([views[positive], *(views[j] for j in others)])
        contrast.append(-torch.log_softmax(keys @ views[i] / 0.2, 0)[0])
    assert left_out, "nothing shows what an instance is"
    # Both directions are added (Eq. 4), in the mean over samples.
    loss = 0.7 * torch.stack(losses).sum() / count + torch.stack(contrast).sum() / n
    loss.backward()
    return {f"capt.{name}": p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def _one_step(mapping: dict[str, Any]) -> dict[str, Any]:
    return gradients(mapping, steps=1)


def test_gradients_are_those_of_a_literal_loop(tmp_path: Path) -> None:
    expected = run_ranks(_literal, 1, _mapping(tmp_path, 1))[0]
    for world in (1, 2, 4):
        ranks = run_ranks(_one_step, world, _mapping(tmp_path, world))
        assert relative(ranks[0]["gradients"][0], expected) < 2e-6, world
