"""BERT's Adam, with which LXMERT was trained, on PyTorch's foreach operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pretrain.engine.optim.base import OwnOptimizer


class BertAdam(OwnOptimizer):
    r"""Adam without bias correction and with decoupled weight decay (Devlin et al. 2019, as released).

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad
        w \leftarrow w - \eta \left( \frac{m}{\sqrt{v} + \epsilon} + \lambda w \right)

    In the first updates it goes up to :math:`(1-\beta_1) / \sqrt{1-\beta_2}` as far as Adam: 3.2 times with .9, .999.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update_group(group, parameters)

    def _update_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
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
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_add_(denominator, group["eps"])
        direction = list(torch._foreach_div(m, denominator))
        if group["weight_decay"]:
            torch._foreach_add_(direction, parameters, alpha=group["weight_decay"])
        torch._foreach_add_(parameters, direction, alpha=-group["lr"])
