"""Gradients that are handed to an engine do what a backward pass does that finds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pretrain.config import load_job
from pretrain.engine import distributed
from pretrain.engine.engines.base import Engine
from pretrain.engine.quiet import quiet_libraries
from tests.support import run_ranks


def _trained(hand_over: bool, stage: int, micro: int, clip: float) -> tuple[list[np.ndarray], list[float]]:
    """Weights and gradient norms of three updates of batches of 8 rows, of which each rank sees its share."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    settings = ["batch.global=8", f"batch.micro={micro}", f"engine.zero_stage={stage}", f"optimizer.clip={clip}"]
    job = load_job("capt_tiny", ["engine.precision=fp32", *settings])
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    engine = Engine("linear", module, job)
    rows, norms = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)), []
    mine = torch.arange(distributed.rank(), 8, distributed.world_size()).split(micro)
    for batch in rows:
        for part in mine:
            if hand_over:
                with torch.no_grad():  # as critics find theirs
                    slope = 2 * engine(batch[part]) / len(part)
                    gradients = [slope.T @ batch[part], slope.sum(0)]
                engine.take_gradients(gradients)
            else:
                engine.backward(engine(batch[part]).square().sum(1).mean())
            engine.step()
        norms.append(float(engine.gradient_norm()))
    return [parameter.detach().numpy().copy() for parameter in module.parameters()], norms


def _both_ways(stage: int, micro: int, clip: float) -> list[tuple[list[np.ndarray], list[float]]]:
    return [_trained(False, stage, micro, clip), _trained(True, stage, micro, clip)]


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_alone_and_shared_with_and_without_accumulation(clip: float) -> None:
    reference: list[np.ndarray] = []
    for world, stage, micro in ((1, 0, 8), (1, 0, 4), (2, 0, 4), (2, 1, 2)):
        for (found, found_norms), (handed, handed_norms) in run_ranks(_both_ways, world, stage, micro, clip):
            reference = reference or found
            np.testing.assert_allclose(handed_norms, found_norms, rtol=1e-6)
            for ours, theirs, first in zip(handed, found, reference, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
                np.testing.assert_allclose(ours, first, rtol=1e-5, atol=1e-6)


def _norms(stage: int, extra: str) -> list[float]:
    """Of three clipped updates of a module whose sizes are no multiples of anything."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    settings = ["batch.global=6", "batch.micro=3", f"engine.zero_stage={stage}", "optimizer.clip=0.1"]
    job = load_job("capt_tiny", ["engine.precision=fp32", *settings, *([extra] if extra else [])])
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 7))
    engine, norms = Engine("layers", module, job), []
    rows = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(1))
    for batch in rows:
        for part in batch[distributed.rank() :: distributed.world_size()].split(3):
            engine.backward(engine(part).square().sum(1).mean())
            engine.step()
        norms.append(float(engine.gradient_norm()))
    return norms


@pytest.mark.parametrize("setting", ["parameter_alignment: true", "round_robin_gradients: true"])
def test_each_element_counts_once_in_the_norm_however_shards_are_laid_out(setting: str) -> None:
    (reference,) = run_ranks(_norms, 1, 0, "")
    for world, stage in ((1, 1), (2, 1), (2, 2)):
        extra = f"engine.deepspeed_extra.zero_optimization={{{setting}}}"
        for norms in run_ranks(_norms, world, stage, extra):
            np.testing.assert_allclose(norms, reference, rtol=1e-6)
