"""Optimizers by name, the fused implementation where one is importable, and a log line that says which is used.

NVIDIA's apex is recognised by its compiled ``amp_C``; the PyPI project called ``apex`` is an unrelated web toolkit
and counts as absent. LAMB follows You et al. 2020 (arXiv 1904.00962), Algorithm 2.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.base.errors import ConfigError
from pretrain.config.schema import EngineSection, OptimizerSection
from pretrain.engine.engines.deepspeed_config import offloads_optimizer

logger = logging.getLogger(__name__)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay; biases and LayerNorm parameters (vectors) do not. One group if nothing decays."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if weight_decay == 0.0:
        return [{"params": parameters, "weight_decay": 0.0}]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def apex_available() -> bool:
    """True when NVIDIA's apex with its compiled kernels can be imported (and a GPU is there to run them)."""
    return torch.cuda.is_available() and importlib.util.find_spec("amp_C") is not None


def build_optimizer(section: OptimizerSection, engine: EngineSection, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``section`` describes, over ``module``'s parameters.

    ``backend: auto`` takes apex's fused kernels when importable and the state lies on the GPU, else torch's fused AdamW
    (which runs where the state lies) or the LAMB below.

    Raises:
        ConfigError: the backend asked for by name is not available here, or cannot update an offloaded state.
    """
    groups = parameter_groups(module, section.weight_decay)
    common: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    backend = section.backend
    if backend == "apex" and not apex_available():
        raise ConfigError(
            "optimizer.backend apex: NVIDIA's apex with compiled kernels (amp_C) and a GPU are not here; use a GPU "
            "image that carries it (docker/Dockerfile.gpu) or backend auto (never `pip install apex`: unrelated)"
        )
    offloaded = offloads_optimizer(engine)
    if backend == "apex" and offloaded:
        raise ConfigError(
            "optimizer.backend apex: its kernels run on a GPU, and engine.offload_optimizer keeps the state in host "
            "memory; use backend auto or deepspeed"
        )
    if backend == "auto":
        backend = "apex" if apex_available() and not offloaded else "torch"
    choice: tuple[str, Callable[[], torch.optim.Optimizer]]
    if backend == "apex":
        from apex import optimizers as apex_optimizers

        name = {"adamw": "FusedAdam", "lamb": "FusedLAMB"}[section.type]
        cls = getattr(apex_optimizers, name)
        if section.type == "lamb":  # apex would clip at 1.0 on its own
            common["max_grad_norm"] = float("inf")
        choice = (f"apex {name}", lambda: cls(groups, **common))
    elif backend == "deepspeed":
        choice = _deepspeed_choice(section, engine, groups, common)
    elif section.type == "lamb":
        choice = ("LAMB (torch foreach)", lambda: Lamb(groups, **common))
    else:
        # The gradient scaler of fp16 at ZeRO 0 would hand scaled gradients to a fused optimizer, past the clipping.
        fused = not (engine.precision == "fp16" and engine.zero_stage == 0)
        name = "torch AdamW (fused)" if fused else "torch AdamW"
        choice = (name, lambda: torch.optim.AdamW(groups, fused=fused, **common))
    logger.info("optimizer: %s", choice[0])
    return choice[1]()


def _deepspeed_choice(
    section: OptimizerSection, engine: EngineSection, groups: list[dict[str, Any]], common: dict[str, Any]
) -> tuple[str, Callable[[], torch.optim.Optimizer]]:
    if section.type == "lamb":
        from deepspeed.ops.lamb import FusedLamb

        if not torch.cuda.is_available():
            raise ConfigError("optimizer.backend deepspeed: DeepSpeed's LAMB needs a GPU; use backend torch or auto")
        return "DeepSpeed FusedLamb", lambda: FusedLamb(groups, **common)
    if offloads_optimizer(engine) or not torch.cuda.is_available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return "DeepSpeed CPUAdam", lambda: DeepSpeedCPUAdam(groups, adamw_mode=True, **common)
    from deepspeed.ops.adam import FusedAdam

    return "DeepSpeed FusedAdam", lambda: FusedAdam(groups, adam_w_mode=True, **common)


class FusedUpdate:
    """The same as ``step()`` of torch's fused AdamW, in a third of its time where a module is as small as a critic.

    The same kernel and the same state, without profiler's ranges, without sorting tensors by device and type (a module
    lies on one device, and its parameters are of one type), and with its lists kept from one update to the next. An
    optimizer with hooks of its own takes its step, and so does one with a parameter that has no gradient.
    """

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self._optimizer = optimizer
        self._groups: list[Moments] = []

    def groups(self) -> list[Moments]:
        """The optimizer's state as lists; empty before its first update."""
        optimizer, kept = self._optimizer, self._groups
        now = optimizer.param_groups
        if len(kept) != len(now) or any(g.replaced(optimizer, options) for g, options in zip(kept, now, strict=True)):
            self._groups = moments_of(optimizer)
        return self._groups

    def __call__(self) -> None:
        """One update."""
        optimizer = self._optimizer
        groups = self.groups()
        gradients: list[list[Any]] = [[p.grad for p in group.parameters] for group in groups]
        lacking = not gradients or any(gradient is None for rows in gradients for gradient in rows)
        if lacking or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            optimizer.step()  # which makes the moments
            return
        with torch.set_grad_enabled(False):
            for group, rows in zip(groups, gradients, strict=True):
                options = group.options
                group.count.add_(1)
                torch._fused_adamw_(
                    group.parameters,
                    rows,
                    group.averages,
                    group.squares,
                    [],
                    group.steps,
                    lr=options["lr"],
                    beta1=options["betas"][0],
                    beta2=options["betas"][1],
                    weight_decay=options["weight_decay"],
                    eps=options["eps"],
                    amsgrad=False,
                    maximize=False,
                )


@dataclass(frozen=True)
class Moments:
    """The lists of one parameter group. ``steps`` are views of ``count``: on a CPU each addition takes 5 us."""

    options: dict[str, Any]
    parameters: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]
    count: Tensor

    def replaced(self, optimizer: torch.optim.AdamW, options: dict[str, Any]) -> bool:
        """True when another state has been loaded (then it has for all parameters), or other options have."""
        state = optimizer.state.get(self.parameters[0], {})
        other = state.get("step") is not self.steps[0] or state.get("exp_avg") is not self.averages[0]
        return other or options is not self.options


def moments_of(optimizer: torch.optim.AdamW) -> list[Moments]:
    """Of all groups; none before the first ``step()``."""
    found = []
    for group in optimizer.param_groups:
        states = [optimizer.state.get(p) for p in group["params"]]
        made = [state for state in states if state]
        if len(made) < len(states):
            return []
        count = torch.stack([state["step"] for state in made])
        steps = list(count.unbind())
        for state, step in zip(made, steps, strict=True):
            state["step"] = step
        averages, squares = ([state[name] for state in made] for name in ("exp_avg", "exp_avg_sq"))
        found.append(Moments(group, list(group["params"]), averages, squares, steps, count))
    return found


class Lamb(torch.optim.Optimizer):
    r"""LAMB: Adam's direction with a trust ratio per parameter tensor (You et al. 2020, Algorithm 2).

    .. math::
        m &= \beta_1 m + (1-\beta_1) g, \quad v = \beta_2 v + (1-\beta_2) g^2 \\
        r &= \hat m / (\sqrt{\hat v} + \epsilon) + \lambda w, \quad
        w \leftarrow w - \eta \, \frac{\|w\|}{\|r\|} \, r

    with the ratio 1 where either norm is 0, and for tensors that do not decay (biases, LayerNorm), as in the authors'
    release. Needs whole parameters, therefore ZeRO stage 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters)
        return loss

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
            self.state[p]["step"] += 1
        grads = [p.grad for p in parameters if p.grad is not None]
        m = [self.state[p]["exp_avg"] for p in parameters]
        v = [self.state[p]["exp_avg_sq"] for p in parameters]
        step = float(self.state[parameters[0]]["step"])
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(torch._foreach_div(v, 1 - beta2**step))
        torch._foreach_add_(denominator, group["eps"])
        direction = list(torch._foreach_div(torch._foreach_div(m, 1 - beta1**step), denominator))
        if group["weight_decay"]:
            torch._foreach_add_(direction, parameters, alpha=group["weight_decay"])
            weight_norm = torch.stack(torch._foreach_norm(parameters))
            direction_norm = torch.stack(torch._foreach_norm(direction))
            both = (weight_norm > 0) & (direction_norm > 0)
            ratio = torch.where(both, weight_norm / direction_norm.clamp_min(1e-38), torch.ones_like(weight_norm))
            torch._foreach_mul_(direction, list(ratio.unbind()))
        torch._foreach_add_(parameters, direction, alpha=-group["lr"])
