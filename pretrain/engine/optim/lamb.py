"""LAMB, on PyTorch's foreach operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pretrain.engine.optim.base import OwnOptimizer


class Lamb(OwnOptimizer):
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

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters)

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
