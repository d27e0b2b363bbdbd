"""Adagrad (Duchi et al. 2011, JMLR 12), dense and sparse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from pretrain.engine.optim.base import OwnOptimizer


class Adagrad(OwnOptimizer):
    r"""PyTorch's Adagrad with its state made at the first update.

    .. math::
        s \leftarrow s + g^2, \quad w \leftarrow w - \eta\, g \big/ (\sqrt{s} + \epsilon)

    ``torch.optim.Adagrad`` makes its state when it is built, and DeepSpeed's ZeRO therefore builds it again: with one
    group for all parameters, so that vectors would decay as well.

    Weight decay is added to the gradient. A sparse gradient updates the rows it holds, and takes no weight decay.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients: list[Tensor] = [p.grad for p in parameters]
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = {"step": torch.zeros(()), "sum": torch.zeros_like(p)}
            adagrad(
                parameters,
                gradients,
                [self.state[p]["sum"] for p in parameters],
                [self.state[p]["step"] for p in parameters],
                has_sparse_grad=any(gradient.is_sparse for gradient in gradients),
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                lr_decay=0.0,
                eps=group["eps"],
                maximize=False,
            )
