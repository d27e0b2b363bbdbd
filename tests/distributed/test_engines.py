"""Every engine trains a module as plain PyTorch would, on one rank or several."""

from __future__ import annotations

import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config import load_job
from capt.pretrain.engine.checkpoint.fragments import WEIGHT, fragments
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.engines.local import LocalEngine
from tests.support import run_ranks

_ROWS = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1))


def _trained(stage: int, micro: int, clip: float, extra: str) -> tuple[bool, list[np.ndarray], list[float]]:
    """Make three updates on 8 rows over all ranks: whether the engine is local, weights, gradient norms."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    settings = ["batch.global=8", f"batch.micro={micro}", f"engine.zero_stage={stage}", f"optimizer.clip={clip}"]
    job = load_job("capt_tiny", ["engine.precision=fp32", *settings, *([extra] if extra else [])])
    torch.manual_seed(0)
    module, norms = nn.Linear(5, 3), []
    engine = build_engines({"linear": module}, job)["linear"]
    mine = torch.arange(distributed.rank(), 8, distributed.world_size()).split(micro)
    for batch in _ROWS:
        for part in mine:
            engine.backward(engine(batch[part]).square().sum(1).mean())
            engine.step()
        norms.append(float(engine.gradient_norm()))
    return isinstance(engine, LocalEngine), [p.detach().numpy().copy() for p in module.parameters()], norms


def _by_hand(clip: float) -> tuple[list[np.ndarray], list[float]]:
    """The same three updates, written as a user of PyTorch would write them."""
    section = load_job("capt_tiny").optimizer
    torch.manual_seed(0)
    module, norms = nn.Linear(5, 3), []
    matrix, vector = {"params": [module.weight]}, {"params": [module.bias], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [matrix, vector], lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay,
        fused=True,
    )  # fmt: skip
    for batch in _ROWS:
        optimizer.zero_grad()
        module(batch).square().sum(1).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf"))))
        optimizer.step()
    return [p.detach().numpy() for p in module.parameters()], norms


_DEEPSPEED = "engine.deepspeed_extra.wall_clock_breakdown=false"
"""An option of DeepSpeed that changes nothing, so that one rank at ZeRO 0 runs under DeepSpeed as well."""


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_every_engine_updates_as_plain_torch_does(clip: float) -> None:
    weights, norms = _by_hand(clip)
    for world, stage, micro, extra in (
        (1, 0, 8, ""),
        (1, 0, 4, ""),
        (1, 0, 4, _DEEPSPEED),
        (2, 0, 4, ""),
        (2, 1, 2, ""),
    ):
        for local, found, found_norms in run_ranks(_trained, world, stage, micro, clip, extra):
            assert local == (world == 1 and not extra)
            np.testing.assert_allclose(found_norms, norms, rtol=1e-5)
            for ours, theirs in zip(found, weights, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
                if micro == 8:
                    assert np.array_equal(ours, theirs), "the local engine is plain PyTorch, to the last digit"


def _norms(stage: int, extra: str) -> list[float]:
    """Gradient norms of three clipped updates of a module with odd sizes."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    settings = ["batch.global=6", "batch.micro=3", f"engine.zero_stage={stage}", "optimizer.clip=0.1"]
    job = load_job("capt_tiny", ["engine.precision=fp32", *settings, *([extra] if extra else [])])
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 7))
    engine, norms = build_engines({"layers": module}, job)["layers"], []
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


def _updated(kind: str, stage: int, micro: int, offload: bool) -> list[tuple[str, int, np.ndarray]]:
    """This rank's fragments after four updates by an optimizer of whole parameters, whose gradients jump."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    settings = ["batch.global=6", f"batch.micro={micro}", f"engine.zero_stage={stage}", "optimizer.lr=0.01"]
    more = [f"optimizer.type={kind}", f"engine.offload_optimizer={offload}"]
    job = load_job("capt_tiny", ["engine.precision=fp32", *settings, *more])
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 7))
    engine = build_engines({"model": nn.Sequential(OrderedDict(layers=layers))}, job)["model"]
    rows = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1))
    for size, batch in zip((1.0, 30.0, 1.0, 10.0), rows, strict=True):
        for part in batch[distributed.rank() :: distributed.world_size()].split(micro):
            engine.backward((size * engine(part)).square().sum(1).mean())
            engine.step()
    return [(f"{f.kind}/{f.name}", f.start, f.view.numpy().copy()) for f in fragments(engine)]


@pytest.mark.parametrize(("kind", "rtol"), [("stable_adamw", 2e-5), ("muon", 1e-3)])
def test_whole_parameters_are_seen_however_they_are_sharded(kind: str, rtol: float) -> None:
    """A root mean square or an orthogonal matrix is of a parameter, of which ZeRO's flat partitions hold parts.

    Newton-Schulz makes small singular values hundreds of times larger, and the rounding of the gradients with them.
    """
    (whole,) = run_ranks(_updated, 1, kind, 0, 6, False)
    expected = {name: values for name, _, values in whole}
    cases = [(2, 0, 3, False), (1, 1, 6, False), (3, 1, 2, False), (3, 2, 1, False), (2, 2, 3, True), (3, 3, 2, False)]
    for world, *case in cases:
        found = {name: np.full_like(values, np.nan) for name, values in expected.items()}
        for name, start, values in (each for rank in run_ranks(_updated, world, kind, *case) for each in rank):
            found[name][start : start + len(values)] = values
        for name, values in expected.items():
            np.testing.assert_allclose(
                found[name], values, rtol=rtol, atol=rtol / 200, err_msg=f"{name} {world} {case}"
            )


class _Layers(nn.Module):
    """Embeddings, two layers and a head, named as encoders name them."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(9, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


_IDS = torch.randint(9, (3, 6), generator=torch.Generator().manual_seed(1))


def _layers(stage: int, micro: int, freeze: str) -> list[tuple[str, int, np.ndarray]]:
    """This rank's fragments after three updates with layer-wise decay."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    settings = ["batch.global=6", f"batch.micro={micro}", f"engine.zero_stage={stage}", "optimizer.weight_decay=0.1"]
    more = ["optimizer.layer_decay=0.5", f"optimizer.freeze={freeze}", "engine.precision=fp32", "optimizer.clip=0"]
    job = load_job("capt_tiny", [*settings, *more])
    torch.manual_seed(0)
    engine = build_engines({"model": _Layers()}, job)["model"]
    for ids in _IDS:
        engine.set_learning_rate(0.1)
        for part in ids[distributed.rank() :: distributed.world_size()].split(micro):
            engine.backward(engine(part).square().sum(1).mean())
            engine.step()
    assert engine.learning_rate() == 0.1
    return [(f.name, f.start, f.view.numpy().copy()) for f in fragments(engine) if f.kind == WEIGHT]


@pytest.mark.parametrize(("freeze", "depth"), [("none", -1), ("1", 1)])
def test_lower_layers_learn_less_or_nothing(freeze: str, depth: int) -> None:
    """Layer l of L at .5 ** (L + 1 - l) of the rate, as AdamW by hand; frozen ones stay as they are, bit for bit."""
    torch.manual_seed(0)
    module, section = _Layers(), load_job("capt_tiny").optimizer
    rates = {"embeddings": 0.0125, "layers.0": 0.025, "layers.1": 0.05, "head": 0.1}
    frozen = list(rates)[: depth + 1]
    groups = [
        {"params": [p], "lr": rate * (name not in frozen), "weight_decay": 0.1 * (p.ndim > 1)}
        for name, rate in rates.items()
        for p in module.get_submodule(name).parameters()
    ]
    optimizer = torch.optim.AdamW(groups, betas=section.betas, eps=section.eps)
    for ids in _IDS:
        optimizer.zero_grad()
        module(ids).square().sum(1).mean().backward()
        optimizer.step()
    expected = {name: p.detach().flatten().numpy() for name, p in module.named_parameters()}
    for world, *case in ((1, 0, 6), (2, 0, 3), (2, 1, 3), (3, 2, 1), (2, 3, 3)):
        found = {name: np.full_like(values, np.nan) for name, values in expected.items()}
        for name, start, values in (each for rank in run_ranks(_layers, world, *case, freeze) for each in rank):
            found[name][start : start + len(values)] = values
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=f"{name} {world} {case}")
            if frozen and name.startswith(tuple(frozen)):
                assert np.array_equal(found[name], values), name


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (nn.Linear(2, 2), ["optimizer.layer_decay=0.9"], "one stack of layers, and this model has no layers"),
        (_Layers(), ["optimizer.freeze=3"], "nothing is left to train; 2 layers may be frozen"),
        (_Layers(), ["optimizer.freeze=1", "engine.precision=fp16"], "keeps frozen weights in 16 bits alone"),
        (nn.ModuleDict({"a": _Layers(), "b": _Layers()}), ["optimizer.freeze=1"], r"stacks .*a\.layers, b\.layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(module: nn.Module, settings: list[str], message: str) -> None:
    job = load_job("capt_tiny", ["engine.zero_stage=1", "engine.precision=fp32", *settings])
    with pytest.raises(ConfigError, match=message):
        build_engines({"model": module}, job)


def _compilers() -> tuple[list[str], dict[str, bool]]:
    """Modules of torch's compiler that an update has loaded, and the operators that DeepSpeed has looked into."""
    import deepspeed

    _trained(1, 4, 0.0, "")
    found = [name for name in ("torch._inductor.compile_fx", "torch._inductor.lowering") if name in sys.modules]
    return found, vars(deepspeed.ops)["__compatible_ops__"]


def test_a_rank_starts_without_a_compiler() -> None:
    """DeepSpeed would ask a C compiler what it can do, and load torch's: a second of a core in every start."""
    assert run_ranks(_compilers, 2) == [([], {"deepspeed_shm_comm": False})] * 2
