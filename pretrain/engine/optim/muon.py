"""Muon for the matrices of hidden layers, AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pretrain.engine.optim.base import OwnOptimizer

Groups = list[dict[str, Any]]


def muon_groups(module: nn.Module, weight_decay: float) -> tuple[Groups, Groups]:
    """The groups for Muon, and those for AdamW: embeddings (tied output layers with them), vectors and tensors.

    As elsewhere, vectors do not decay.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    parameters = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in tables]
    taken = {id(p) for p in matrices}
    others = [
        {"params": [p for p in parameters if p.ndim > 1 and id(p) not in taken], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [{"params": matrices, "weight_decay": weight_decay}], [group for group in others if group["params"]]


class MuonWithAdamW(OwnOptimizer):
    r"""Muon (Jordan 2024; Liu et al. 2025, arXiv 2502.16982) with AdamW beside it.

    A matrix of shape (A, B) moves along its Nesterov momentum, made orthogonal by five Newton-Schulz steps, by
    :math:`0.2\,\eta\sqrt{\max(A, B)}`: as far as AdamW would go with the same learning rate :math:`\eta`, so that one
    learning rate and one weight decay serve both. Needs whole matrices, therefore ZeRO stage 0.

    Args:
        matrices: parameter groups of matrices.
        others: parameter groups of the rest.
    """

    def __init__(
        self, matrices: Groups, others: Groups, *, lr: float, momentum: float, betas: tuple[float, float], eps: float
    ) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        if any(group["params"] for group in matrices):
            rule = "match_rms_adamw"
            self._parts.append(torch.optim.Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn=rule))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:  # the groups are shared as they are: a learning rate set here is theirs
            part.state = self.state

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        for part in self._parts:
            part.step()
