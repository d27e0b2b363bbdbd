"""The average of the weights that an optimizer keeps, against the equation in float64."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import load_job
from capt.pretrain.engine.engines.base import averaged_weights
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.optim.build import STATE_TENSORS
from capt.pretrain.engine.optim.optimizers import AVERAGE, keep_average
from capt.pretrain.engine.optim.settings import ModuleOptimizer

_DECAY = 0.9


def _engine(module: nn.Module, **optimizer: Any) -> Any:
    """Build the engine of one rank, which keeps averages."""
    overrides = [f"optimizer.{key}={value}" for key, value in {"lr": 0.05, "weight_decay": 0, **optimizer}.items()]
    sizes = ["engine.zero_stage=0", "engine.precision=fp32", "batch.global=4", "batch.micro=4"]
    job = load_job("capt_tiny", [*overrides, *sizes])
    return build_engines({"model": module}, job, {"model": ModuleOptimizer(job.optimizer, average=_DECAY)})["model"]


def _average(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor:
    average: Tensor = optimizer.state[p][AVERAGE]
    return average


@pytest.mark.parametrize("kind", sorted(STATE_TENSORS.keys() - {"sparse_adam"}))
def test_equals_a_loop(kind: str) -> None:
    """Ten updates with each optimizer; the bias has no gradient in the first three, and none in the eighth."""
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    engine = _engine(nn.ModuleDict({"layers": nn.ModuleList([module])}), type=kind)  # Muon is for numbered layers
    truth = {p: p.detach().double() for p in module.parameters()}
    for step in range(10):
        loss = torch.nn.functional.linear(torch.randn(4, 5), module.weight).square().mean()
        if step not in (0, 1, 2, 7):
            loss = loss + (module.bias - 1).square().mean()
        engine.backward(loss)
        engine.step()
        for p in module.parameters():
            truth[p] = _DECAY * truth[p] + (1 - _DECAY) * p.detach().double()
        assert (AVERAGE in engine.base_optimizer.state.get(module.bias, {})) == (step >= 3)
    for p, average in truth.items():
        torch.testing.assert_close(_average(engine.base_optimizer, p).double(), average, rtol=1e-5, atol=1e-7)
        assert (p - average).abs().max() > 1e-2, "the weights have moved away from their average"


def test_a_step_that_was_skipped_is_none() -> None:
    """The scaler of fp16 skips a step whose gradients have overflowed; the average does not move then."""
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    keep_average(optimizer, _DECAY)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for value in (1.0, float("inf"), 1.0):
        p.grad = None
        scaler.scale((p * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    first = _DECAY * 1.0 + (1 - _DECAY) * 0.9
    torch.testing.assert_close(_average(optimizer, p), torch.full((3,), _DECAY * first + (1 - _DECAY) * 0.8))


def test_the_average_is_of_fp32_and_moves_at_the_slowest_decay() -> None:
    """A bf16 average would stay at 1: half a unit in the last place of 1 is 2e-3, and a step moves it by 5e-5."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    keep_average(optimizer, 0.9995)
    p.grad = torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(_average(optimizer, p), torch.full((2,), 1 - 0.0005 * 0.1), rtol=1e-7, atol=0)


def test_weights_and_averages_change_places_and_back() -> None:
    """At ZeRO 0 nothing is copied; a weight that has never been updated is the same within."""
    module = nn.Linear(2, 2)
    engine = _engine(module)
    engine.backward(torch.nn.functional.linear(torch.ones(1, 2), module.weight).sum())
    engine.step()
    live = {name: (p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    with averaged_weights(engine):
        assert torch.equal(module.weight, _average(engine.base_optimizer, module.weight))
        assert not torch.equal(module.weight, live["weight"][1])
        assert torch.equal(module.bias, live["bias"][1])
    for name, p in module.named_parameters():
        assert p.data_ptr() == live[name][0]
        assert torch.equal(p, live[name][1])


def test_partitions_that_another_optimizer_updates_are_refused() -> None:
    """DeepSpeed has a second optimizer where it offloads a share of the optimizer's state."""
    flats = [torch.zeros(2), torch.zeros(3)]
    engine = _engine(nn.Linear(2, 2))
    engine.zero_stage = 2
    engine.base_optimizer.state[flats[0]] = {AVERAGE: torch.zeros(2)}
    engine.zero_optimizer = types.SimpleNamespace(single_partition_of_fp32_groups=flats)
    with pytest.raises(ConfigError, match=r"offload_optimizer\.ratio, or set contrast\.momentum=null"), \
         averaged_weights(engine):  # fmt: skip
        pass


def test_averages_in_files_are_refused() -> None:
    extra = "engine.deepspeed_extra.zero_optimization.offload_optimizer.device=nvme"
    job = load_job("capt_tiny", ["engine.zero_stage=3", extra, "batch.global=4", "batch.micro=4"])
    with pytest.raises(ConfigError, match=r"offload_optimizer\.device=cpu, not nvme, or contrast\.momentum=null"):
        build_engines({"model": nn.Linear(2, 2)}, job, {"model": ModuleOptimizer(job.optimizer, average=_DECAY)})
