"""What a kernel provides: the arithmetic that one rank does on the keys it holds.

Shapes: ``N`` anchors (gathered from all ranks), ``c`` keys (held by this rank), ``d`` features. Anchors come divided by
the temperature, so that a logit is the plain dot product :math:`s_{ij} = q_i \\cdot k_j`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pretrain.contrast.kernels.products import Products


class Ids:
    """Instances of anchors ``(N,)`` and of keys ``(c,)``: where they are equal, the key is not a negative."""

    def __init__(self, anchors: Tensor, keys: Tensor) -> None:
        self.anchors, self.keys = anchors, keys
        self._negatives: Tensor | None = None

    def of(self, rows: slice, columns: slice) -> Ids:
        """Those of a block."""
        return Ids(self.anchors[rows], self.keys[columns])

    def own(self) -> Tensor:
        """``(N, c)``, true where the key is of the anchor's own instance."""
        return self.anchors[:, None] == self.keys[None, :]

    @property
    def negatives(self) -> Tensor:
        """``(N, c)``, 1 where the key is a negative and 0 elsewhere: a factor of exponentials.

        In fp32 on a CPU, which multiplies numbers ten times as fast as it fills by a mask, and in bytes on a GPU.
        """
        if self._negatives is None:
            dtype = torch.float32 if self.anchors.is_cpu else torch.bool
            factor = torch.empty(len(self.anchors), len(self.keys), dtype=dtype, device=self.anchors.device)
            self._negatives = torch.ne(self.anchors[:, None], self.keys[None, :], out=factor)
        return self._negatives


@dataclass(frozen=True)
class Sums:
    r"""Running sums over keys, one row an anchor, changed in place.

    ``normaliser (N,)`` is :math:`\sum_j e^{s_{ij}-r_i}`; ``weighted (N, d)`` is :math:`\sum_j e^{s_{ij}-r_i} k_j`, or
    ``None`` where no gradient is wanted. ``reference (N,)`` is :math:`r_i`, the largest logit so far, or ``None`` for
    :math:`r_i = 0`, which is right for logits of bounded size.
    """

    normaliser: Tensor
    weighted: Tensor | None
    reference: Tensor | None

    def __getitem__(self, rows: slice) -> Sums:
        """The sums of some anchors; a view, so that adding to it adds to these."""
        weighted = None if self.weighted is None else self.weighted[rows]
        return Sums(self.normaliser[rows], weighted, None if self.reference is None else self.reference[rows])

    def exponentials(self, logits: Tensor, ids: Ids | None) -> Tensor:
        """:math:`e^{s_{ij} - r_i}`, 0 for own keys, in the place of ``logits (N, c)``; the reference rises before."""
        if self.reference is None:
            return logits.exp_() if ids is None else logits.exp_().mul_(ids.negatives)
        if ids is not None:
            logits.masked_fill_(ids.own(), -torch.inf)
        return logits.sub_(self.raise_reference(logits.amax(1))[:, None]).exp_()

    def raise_reference(self, logits: Tensor) -> Tensor:
        """Make the reference at least ``logits (N,)`` and return it; the sums keep their meaning."""
        assert self.reference is not None
        highest = torch.maximum(self.reference, logits)
        shrink = torch.exp(self.reference - highest)
        self.normaliser.mul_(shrink)
        if self.weighted is not None:
            self.weighted.mul_(shrink[:, None])
        return self.reference.copy_(highest)


def probabilities(logits: Tensor, lse: Tensor, ids: Ids | None) -> Tensor:
    r""":math:`e^{s_{ij} - \mathrm{lse}_i}`, 0 for own keys, in the place of ``logits (N, c)``.

    A negative's logit is never above ``lse (N,)``, but that of an own key, which is not in it, may be.
    """
    below = logits.sub_(lse[:, None])
    return below.exp_() if ids is None else below.clamp_max_(0.0).exp_().mul_(ids.negatives)


@runtime_checkable
class Kernel(Protocol):
    """A module with these two functions."""

    def accumulate(self, sums: Sums, q: Tensor, keys: Tensor, ids: Ids | None, products: Products) -> None:
        """Add the keys ``(c, d)`` to the sums of the anchors ``q (N, d)``."""

    def key_gradient(self, q: Tensor, keys: Tensor, lse: Tensor, ids: Ids | None, products: Products) -> Tensor:
        r"""The ``(c, d)`` rows :math:`\sum_i e^{s_{ij} - \mathrm{lse}_i} q_i` over the anchors that see key ``j``."""
