"""Arguments of apex's fused optimizers: groups, decay, epsilon and modes, by a stand-in with their interface.

apex needs a GPU and is not on PyPI. The stand-in has the signatures, defaults and group-wise count of steps of
apex.optimizers, and computes what its kernels are documented to: AdamW, and LAMB that clips at ``max_grad_norm`` and
leaves the trust ratio to what decays.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capt.pretrain.config import load_job
from capt.pretrain.engine.checkpoint.fragments import optimizer_step_count, set_optimizer_step_count
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.optim import build
from capt.pretrain.engine.optim.build import build_optimizer
from tests.support import run_ranks


class _Fused(torch.optim.Optimizer):
    """Both: the number of steps is the group's, and ``zero_grad`` takes no argument."""

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group, norm)

    def _moments(self, p: Tensor, group: dict[str, Any], scale: float) -> Tensor:
        """The direction of Adam, with its moments after this gradient."""
        assert p.grad is not None
        state, (b1, b2), t = self.state[p], group["betas"], group["step"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        g = p.grad / scale
        state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
        root = (state["exp_avg_sq"] / (1 - b2**t)).sqrt()
        direction: Tensor = state["exp_avg"] / (1 - b1**t) / (root + group["eps"])
        return direction

    def _move(self, p: Tensor, group: dict[str, Any], norm: float) -> None:
        raise NotImplementedError


class FusedAdam(_Fused):
    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Any = (0.9, 0.999), eps: float = 1e-8,
        adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
        capturable: bool = False, master_weights: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay})  # fmt: skip
        assert adam_w_mode
        assert not amsgrad

    def _move(self, p: Tensor, group: dict[str, Any], norm: float) -> None:
        p -= group["lr"] * (self._moments(p, group, 1.0) + group["weight_decay"] * p)


class FusedLAMB(_Fused):
    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Any = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.01, amsgrad: bool = False, adam_w_mode: bool = True, grad_averaging: bool = True,
        set_grad_none: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay, "grad_averaging": grad_averaging,
                                  "max_grad_norm": max_grad_norm})  # fmt: skip
        assert adam_w_mode
        assert grad_averaging
        self.use_nvlamb = use_nvlamb

    def _move(self, p: Tensor, group: dict[str, Any], norm: float) -> None:
        most = self.defaults["max_grad_norm"]
        direction = self._moments(p, group, norm / most if norm > most else 1.0) + group["weight_decay"] * p
        ratio = 1.0
        if (self.use_nvlamb or group["weight_decay"]) and p.norm() and direction.norm():
            ratio = float(p.norm() / direction.norm())
        p -= group["lr"] * ratio * direction


def _install(patch: pytest.MonkeyPatch) -> None:
    """Let ``import apex`` find the stand-in, with kernels and a GPU."""
    apex, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    optimizers.FusedAdam, optimizers.FusedLAMB = FusedAdam, FusedLAMB  # type: ignore[attr-defined]
    apex.optimizers = optimizers  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "apex", apex)
    patch.setitem(sys.modules, "apex.optimizers", optimizers)
    patch.setattr(build, "apex_available", lambda: True)


class _Model(nn.Module):
    """Embeddings, two layers and a head, in float64 so that both ways agree to the last digits."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.double()


def _trained(kind: str, backend: str, more: tuple[str, ...]) -> tuple[torch.optim.Optimizer, _Model]:
    """Four updates by gradients whose norm is far above 1."""
    job = load_job("capt_tiny", [
        "engine.zero_stage=0", "engine.precision=fp32", f"optimizer.type={kind}", f"optimizer.backend={backend}",
        "optimizer.lr=0.02", "optimizer.betas=[0.7,0.9]", "optimizer.eps=1e-3", *more,
    ])  # fmt: skip
    torch.manual_seed(0)
    model = _Model()
    optimizer = build_optimizer(job.optimizer, job.engine, model)
    for _ in range(4):
        for p in model.parameters():
            p.grad = 30 * torch.randn_like(p)
        optimizer.step()
    return optimizer, model


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
@pytest.mark.parametrize("more", [(), ("optimizer.weight_decay=0",), ("optimizer.layer_decay=0.5",)], ids=str)
def test_apex_gets_the_groups_of_torch_and_makes_its_updates(
    kind: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, expected = _trained(kind, "torch", ("optimizer.weight_decay=0.1", *more))
    _install(monkeypatch)
    fused, model = _trained(kind, "apex", ("optimizer.weight_decay=0.1", *more))
    assert type(fused) is (FusedAdam if kind == "adamw" else FusedLAMB)
    names = [{id(p): name for name, p in each.named_parameters()} for each in (model, expected)]
    for ours, theirs in zip(fused.param_groups, plain.param_groups, strict=True):
        own, other = ([of[id(p)] for p in group["params"]] for of, group in zip(names, (ours, theirs), strict=True))
        assert own == other
        decays = "optimizer.weight_decay=0" not in more and all(p.ndim > 1 for p in ours["params"])
        assert ours["weight_decay"] == theirs["weight_decay"] == (0.1 if decays else 0.0)
        for key in ("lr", "betas", "eps", "lr_scale"):
            assert ours.get(key) == theirs.get(key), key
        assert ours["step"] == 4
    if isinstance(fused, FusedLAMB):  # clipping is the engine's
        assert (fused.defaults["max_grad_norm"], fused.use_nvlamb) == (math.inf, False)
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12, msg=name)


def _steps(folder: str, stage: int, backend: str, kind: str) -> tuple[list[float], int]:
    """Two updates by an engine, their count set as a resume sets it, and one more: the weights and the count."""
    with pytest.MonkeyPatch.context() as patch:
        _install(patch)
        job = load_job("capt_tiny", [
            f"engine.zero_stage={stage}", "engine.precision=fp32", f"optimizer.type={kind}",
            f"optimizer.backend={backend}", "optimizer.weight_decay=0.1", "batch.global=4", "batch.micro=4",
            f"run.dir={folder}/run",
        ])  # fmt: skip
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        engine = build_engines({"model": module}, job)["model"]
        for number in range(3):
            if number == 2:
                set_optimizer_step_count(engine, optimizer_step_count(engine))
            engine.set_learning_rate(1e-2)
            engine.backward(engine(torch.arange(6.0).view(2, 3)).square().sum())
            engine.step()
        weights = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
        return weights.tolist(), optimizer_step_count(engine)


@pytest.mark.parametrize(("stage", "kind"), [(0, "adamw"), (0, "lamb"), (1, "adamw")])
def test_an_engine_trains_with_apex_as_with_torch(stage: int, kind: str, tmp_path: Path) -> None:
    ((plain, counted),) = run_ranks(_steps, 1, str(tmp_path), stage, "torch", kind)
    ((fused, of_groups),) = run_ranks(_steps, 1, str(tmp_path), stage, "apex", kind)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-7)
    assert counted == of_groups == 3
