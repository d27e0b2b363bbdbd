"""Rows to try the contrastive loss on, and the oracle for any layout of samples over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.contrast.reference import effective_negatives_by_terms, hard_weights_by_terms, info_nce_dense

TEMPERATURES = (0.5, 0.1, 0.05, 0.02, 0.01)


def unit(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random rows of unit norm."""
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(rows, dim=-1).to(dtype)


def near(rows: Tensor, noise: float, seed: int) -> Tensor:
    """Unit rows close to the given ones; with little noise every anchor has found its positive (p+ -> 1)."""
    moved = rows.double() + noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)).double()
    return F.normalize(moved, dim=-1).to(rows.dtype)


def clustered(n: int, d: int, seed: int) -> Tensor:
    """Unit rows around 8 centres: many hard negatives."""
    generator = torch.Generator().manual_seed(seed)
    centres = unit(8, d, seed=1)
    chosen = centres[torch.randint(8, (n,), generator=generator)]
    return F.normalize(chosen + 0.1 * torch.randn(n, d, generator=generator), dim=-1)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@dataclass
class Problem:
    """CAPT on samples of all ranks together: ``owner[g]`` is the rank of sample ``g``."""

    s: Tensor
    s_hat: Tensor
    owner: Tensor
    queue: Tensor
    temperature: float
    in_batch: str = "global"
    ids: Tensor | None = None
    queue_ids: Tensor | None = None
    hardness: float = 0.0

    def solve(self, reduction: str = "mean") -> tuple[float, Tensor, Tensor, float]:
        """Eq. 4 in float64 (sum, or mean over samples) and its gradients by s, s_hat and the temperature."""
        s, s_hat = self.s.double().requires_grad_(), self.s_hat.double().requires_grad_()
        tau = torch.tensor(self.temperature, dtype=torch.float64, requires_grad=True)
        rows, partners, n = torch.cat([s, s_hat]), torch.cat([s_hat, s]), len(s)
        keys = torch.cat([rows, self.queue.double()])
        loss = info_nce_dense(rows, partners, keys, self.is_negative(), tau, self.weights()).sum()
        loss = loss / n if reduction == "mean" else loss
        d_s, d_s_hat, d_tau = torch.autograd.grad(loss, (s, s_hat, tau))
        return loss.item(), d_s, d_s_hat, d_tau.item()

    def effective_negatives(self) -> float:
        """Mean over the anchors of all ranks."""
        rows = torch.cat([self.s, self.s_hat])
        keys = torch.cat([rows, self.queue])
        numbers = effective_negatives_by_terms(rows, keys, self.is_negative(), self.temperature, self.weights())
        return sum(numbers) / len(numbers)

    def weights(self) -> Tensor | None:
        """Weight of each key for each anchor; None: 1."""
        if not self.hardness:
            return None
        rows, live = torch.cat([self.s, self.s_hat]), 2 * len(self.s)
        queued = hard_weights_by_terms(rows, self.queue, self.is_negative()[:, live:], self.hardness)
        return torch.cat([torch.ones(live, live, dtype=torch.float64), queued], 1)

    def is_negative(self) -> Tensor:
        """Return whether key ``j`` of both views and the queue is a negative of anchor ``i``."""
        n = len(self.s)
        instances = (torch.arange(n) if self.ids is None else self.ids).repeat(2)
        owner = self.owner.repeat(2)
        live = instances[:, None] != instances[None, :]
        if self.in_batch == "local":
            live &= owner[:, None] == owner[None, :]
        if self.in_batch == "none":
            live[:] = False
        queued = torch.ones(2 * n, len(self.queue), dtype=torch.bool)
        if self.ids is not None and self.queue_ids is not None:
            queued = instances[:, None] != self.queue_ids[None, :]
        return torch.cat([live, queued], 1)
