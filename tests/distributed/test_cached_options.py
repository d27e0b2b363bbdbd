"""A contrast over many micro-batches with activation checkpointing, and under fp16's loss scale.

The second pass draws the dropout of the first, and layers that are computed again draw that of the second. A loss scale
multiplies what flows back from the second pass alone: the gradient of the contrast itself is taken in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast import capt_loss
from capt.pretrain.contrast.cached import cached_backward
from capt.pretrain.contrastive.views import KeptGraphs
from tests.gradients import STEPS, gradients, relative
from tests.language import language_mapping
from tests.support import emulate_fp16, run_ranks
from tests.vision_language import vision_language_mapping

_GLOBAL = 8
_FEW = 2
"""Steps where the first one shows what the others do; the second has a queue."""


def _with_seeds(jobs: list[tuple[dict[str, Any], int]], steps: int = STEPS) -> list[dict[str, Any]]:
    return [gradients(mapping, seed=1000 * seed + 100 * dist.get_rank(), steps=steps) for mapping, seed in jobs]


def _checkpointed(folder: Path, family: str, stage: int, kind: str) -> dict[str, Any]:
    make = {"language": language_mapping, "vision-language": vision_language_mapping}[family]
    sizes: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1, "initializer_range": 0.2}
    if family == "vision-language":
        sizes["layer_norm_eps"] = 1e-5
    return make(
        folder,
        batch={"global": _GLOBAL, "micro": 2},
        engine={"zero_stage": stage, "precision": "fp32"},
        optimizer={"lr": 1e-9},
        model={**sizes, "activation_checkpointing": kind},
        contrast={"queue": 41, "cached": True},
    )


_FAIRSCALE = "fairscale" if find_spec("fairscale") else "full"


@pytest.mark.parametrize(
    ("family", "cases"),
    [
        ("language", [(0, "full"), (0, "offload"), (1, _FAIRSCALE), (3, "full"), (3, "offload"), (3, _FAIRSCALE)]),
        pytest.param("vision-language", [(0, "offload"), (1, _FAIRSCALE), (3, "full")], marks=pytest.mark.family),
    ],
)
def test_activation_checkpointing_changes_no_gradient(tmp_path: Path, family: str, cases: list[Any]) -> None:
    """Against ZeRO 0 without it. The bound notices dropout that is drawn anew."""
    plain = _checkpointed(tmp_path, family, 0, "none")
    jobs = [(plain, 0), (plain, 1), *((_checkpointed(tmp_path, family, *case), 0) for case in cases)]
    first, drawn_anew, *others = (each["gradients"] for each in run_ranks(_with_seeds, 2, jobs, _FEW)[0])
    for case, other in zip(cases, others, strict=True):
        assert max(relative(other[step], first[step]) for step in range(_FEW)) < 1e-6, case
    assert relative(drawn_anew[0], first[0]) > 1e-2


@pytest.mark.parametrize(
    ("world", "family", "cases"),
    [
        (1, "language", [(0, "none", (0, 1, 3, 4))]),  # of four micro-batches
        (2, "language", [(1, "none", (0, 1, 2)), (2, "full", (0, 2))]),  # of two
        (2, "vision-language", [(1, "full", (0, 1))]),
    ],
)
def test_kept_graphs_change_no_gradient(tmp_path: Path, world: int, family: str, cases: Any) -> None:
    """Every digit is equal, with dropout, also where the only pass is one of recomputed layers."""
    jobs, kept = [], []
    for stage, kind, numbers in cases:
        for keep in numbers:
            mapping = _checkpointed(tmp_path, family, stage, kind)
            jobs.append(({**mapping, "contrast": {**mapping["contrast"], "keep": keep}}, 0))
            kept.append(keep)
    none: dict[str, Any] = {}
    for keep, found in zip(kept, run_ranks(_with_seeds, world, jobs)[0], strict=True):
        none = found if keep == 0 else none  # each case begins with it
        assert found["losses"] == none["losses"]
        for step in range(STEPS):
            for name, gradient in none["gradients"][step].items():
                np.testing.assert_array_equal(found["gradients"][step][name], gradient)


def _calls(mapping: dict[str, Any]) -> list[tuple[str, Any]]:
    """Calls of `KeptGraphs` in two steps: their sequences, and whether their update was left out."""
    told: list[tuple[str, Any]] = []
    begin, end = KeptGraphs.begin_step, KeptGraphs.end_step

    def begun(self: KeptGraphs, sequences: int) -> None:
        told.append(("begun", sequences))
        begin(self, sequences)

    def ended(self: KeptGraphs, was_skipped: Callable[[], bool]) -> None:
        told.append(("ended", was_skipped()))
        end(self, was_skipped)

    with mock.patch.multiple(KeptGraphs, begin_step=begun, end_step=ended):
        gradients(mapping, steps=_FEW)
    return told


def test_the_room_for_graphs_is_looked_at_in_every_step(tmp_path: Path) -> None:
    mapping = _checkpointed(tmp_path, "language", 0, "none")
    assert run_ranks(_calls, 1, mapping)[0] == [("begun", _GLOBAL), ("ended", False)] * _FEW


def test_zero_3_keeps_no_graph(tmp_path: Path) -> None:
    mapping = _checkpointed(tmp_path, "language", 3, "none")
    mapping["contrast"] = {**mapping["contrast"], "keep": 1}
    assert "engine.zero_stage to 0, 1 or 2" in run_ranks(_refusal, 1, mapping)[0]


def _refusal(mapping: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        gradients(mapping)
    return str(refused.value)


def _scaled(jobs: list[tuple[dict[str, Any], float]]) -> list[dict[str, Any]]:
    emulate_fp16()
    return [gradients(mapping, scale=scale, steps=_FEW) for mapping, scale in jobs]


def _fp16(folder: Path, world: int, stage: int, micro: int, **contrast: Any) -> dict[str, Any]:
    return language_mapping(
        folder,
        batch={"global": _GLOBAL, "micro": micro // world},
        engine={"zero_stage": stage, "precision": "fp16"},
        optimizer={"lr": 1e-9},
        model={"initializer_range": 0.2},
        contrast={"queue": 41, **contrast},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of one micro-batch with its graph, which another weight of the contrast changes."""
    folder = tmp_path_factory.mktemp("whole")
    jobs = [(_fp16(folder, 1, 0, _GLOBAL, cached=False), 256.0), (_fp16(folder, 1, 0, 2, weight=0.9), 256.0)]
    whole, lighter = run_ranks(_scaled, 1, jobs)[0]
    assert relative(lighter["gradients"][0], whole["gradients"][0]) > 2e-2
    return whole


@pytest.mark.parametrize("world", [1, 2])
def test_the_loss_scale_is_nothing_to_the_gradient(tmp_path: Path, whole: dict[str, Any], world: int) -> None:
    """Against one micro-batch with its graph. A contrast that is not scaled would weigh nothing, scaled twice all."""
    # A process that has had autocast's scaler uses it at every stage.
    for cases in ([(0, 16.0), (0, 1024.0)], [(1, 1024.0), (2, 16.0), (3, 1024.0)]):
        jobs = [(_fp16(tmp_path, world, stage, 2), scale) for stage, scale in cases]
        for case, cut in zip(cases, run_ranks(_scaled, world, jobs)[0], strict=True):
            for step in range(_FEW):
                assert relative(cut["gradients"][step], whole["gradients"][step]) < 1e-2, case


def _encoder() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def _views(encoder: nn.Module, x: Tensor) -> list[Tensor]:
    return list(nn.functional.normalize(encoder(torch.cat([x, x + 0.1])), dim=1).split(len(x)))


def _samples() -> Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _in_ddp() -> tuple[float, list[np.ndarray]]:
    """``cached_backward`` on a rank's half of the samples in three micro-batches, reduced with the last one."""
    plain = _encoder()
    encoder = nn.parallel.DistributedDataParallel(plain)
    parts = list(_samples()[dist.get_rank() :: 2].split(2))

    def encode(number: int) -> list[Tensor]:
        with nullcontext() if number == len(parts) - 1 else encoder.no_sync():
            return _views(encoder, parts[number])

    loss = cached_backward(encode, range(len(parts)), lambda s, s_hat: capt_loss(s, s_hat, temperature=0.1))
    return loss.item(), [p.grad.numpy() for p in plain.parameters() if p.grad is not None]


def test_in_a_loop_with_ddp_the_gradient_is_that_of_all_samples_at_once() -> None:
    whole = _encoder()
    expected = capt_loss(*_views(whole, _samples()), temperature=0.1)
    expected.backward()
    ranks = run_ranks(_in_ddp, 2)
    assert np.mean([loss for loss, _ in ranks]) == pytest.approx(expected.item(), rel=1e-12)
    for _, gradient in ranks:
        for mine, p in zip(gradient, whole.parameters(), strict=True):
            assert p.grad is not None
            np.testing.assert_allclose(mine, p.grad.numpy(), rtol=1e-9, atol=1e-13)
