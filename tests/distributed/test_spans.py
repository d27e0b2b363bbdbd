"""Gradients of spans: a literal float64 loop on 1, 2 and 4 ranks that share unevenly.

Crops have masks in both views; neighbours have them in the second, and a bottleneck of which the texts are these spans.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from capt.pretrain.config.load import job_from_mapping
from tests.bottleneck import literal_losses
from tests.gradients import gradients, relative
from tests.language import language_mapping, write_corpus
from tests.support import run_ranks

BATCH = 9
"""Samples of a step: 2 and 4 ranks cannot share them evenly."""


VIEWS: dict[str, dict[str, Any]] = {
    "crop": {"mlm": {"views": "both", "weight": 0.7}},
    "neighbour": {"mlm": {"weight": 0.7}, "bottleneck": {"head": "both", "bow_weight": 0.4, "decoder_weight": 0.8}},
}


def _mapping(folder: Path, world: int, view: str) -> dict[str, Any]:
    if not (folder / "text.txt").exists():
        write_corpus(folder / "text.txt", 12)
    mapping = language_mapping(
        folder, batch={"global": BATCH, "micro": 3 if world == 1 else 2}, optimizer={"lr": 1e-9, "clip": 0.0},
        model={"initializer_range": 0.2, "pooling": "mean"}, **VIEWS[view],
        contrast={"queue": 0, "temperature": {"type": "constant", "value": 0.2}},
        engine={"zero_stage": (0, 1, 3)[world // 2]},
    )  # fmt: skip
    # Few documents, so that a step holds several runs of one, which are no negatives of each other.
    mapping["data"] |= {
        "validation_fraction": 0.0,
        "view": view,
        "passage": 40,
        "apart": 1000,
        "spans": {"share": [0.3, 0.6]},
    }
    return mapping


def _literal(mapping: dict[str, Any]) -> dict[str, np.ndarray]:
    """The gradient of the first step: every view encoded by itself, without padding, one term after the other."""
    from capt.pretrain.base import distributed
    from capt.pretrain.language.task import LanguageTask

    distributed.device()
    job: Any = job_from_mapping(mapping, "test")
    task = LanguageTask(job, Path(mapping["run"]["dir"]))
    module: Any = task.build_modules()["model"].double()
    model = module.capt
    batch = task.micro_batch(task.assembler("train"), np.arange(BATCH), 0)
    assert batch.instances is not None
    n, pad = BATCH, task.model_config.pad_id
    views, losses, count = [], [], 0
    unmasked = 2 * n - len(batch.labels)
    for row, tokens in enumerate([*batch.tokens, *batch.corrupted]):
        text = tokens[tokens != pad][None]
        hidden = model.encoder(text, padded=False)[0]
        views.append(model.aggregation(hidden.mean(0, keepdim=True))[0].double())
        if row < unmasked:
            continue
        used = batch.labels[row - unmasked] != -100
        labels = batch.labels[row - unmasked][used]
        logits = model.mlm.logits(hidden[batch.positions[row - unmasked][used]])
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
    if job.bottleneck.on:
        heads = literal_losses(module, batch.to(torch.device("cpu")), job.bottleneck, "mean")
        loss = loss + 0.4 * heads["bow"] + 0.8 * heads["decoder"]
    loss.backward()
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


def _literals(mappings: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    return [_literal(mapping) for mapping in mappings]


def _first_steps(mappings: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    return [gradients(mapping, steps=1)["gradients"][0] for mapping in mappings]


def test_gradients_are_those_of_a_literal_loop(tmp_path: Path) -> None:
    (literals,) = run_ranks(_literals, 1, [_mapping(tmp_path, 1, view) for view in VIEWS])
    for world in (1, 2, 4):
        found = run_ranks(_first_steps, world, [_mapping(tmp_path, world, view) for view in VIEWS])[0]
        for view, ours, literal in zip(VIEWS, found, literals, strict=True):
            assert relative(ours, literal) < 2e-6, (world, view)
            heads = [{name: g for name, g in each.items() if "bottleneck" in name} for each in (ours, literal)]
            assert (view == "neighbour") == bool(heads[1])
            assert not heads[1] or relative(*heads) < 1e-5, (world, view)
