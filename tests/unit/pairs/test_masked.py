"""Masked language modelling beside the contrast: the loss of a step is the mean over all masked tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.pairs.task import PairTask
from tests.pairs import pairs_mapping


def test_the_loss_of_a_step_is_that_of_each_masked_token(tmp_path: Path) -> None:
    job = job_from_mapping(
        pairs_mapping(tmp_path, mlm={"weight": 0.3}, corruption={"rate": 0.3}, schedule={"max_steps": 2}), "test"
    )
    task = PairTask(job, tmp_path / "run")
    module = task.build_modules()["model"].eval()
    engine = LocalEngine("model", module, task.job, ModuleOptimizer(task.job.optimizer))
    progress = Progress()
    batch = next(iter(task.build_batches(progress)))
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        for part in batch:
            assert len(part.masked_lengths) == 2 * len(part.ids), "the query and the document of each row"
            lengths = part.masked_lengths.tolist()
            for text, labels in zip(part.masked.split(lengths), part.labels.split(lengths), strict=True):
                logits = module.mlm.logits(module.encoder.model(text[None].long()))[0]
                chosen = labels >= 0
                losses += [cross_entropy(logits[chosen], labels[chosen].long(), reduction="none")]
    expected = torch.cat(losses).mean()
    report = task.step({"model": engine}, batch, progress)
    assert float(report["loss/mlm"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(report["loss"]) == pytest.approx(0.3 * float(expected) + float(report["loss/pairs"]), rel=1e-5)
