"""What this package's own optimizers share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer with PyTorch's ``step``: the closure is called with gradients on, the update made without them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure``, if any, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Update every parameter that has a gradient. Called without autograd."""
