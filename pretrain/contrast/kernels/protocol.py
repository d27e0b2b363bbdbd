"""What a kernel provides: the arithmetic that one rank does on the keys it holds.

Shapes: ``N`` anchors (gathered from all ranks), ``c`` keys (held by this rank), ``d`` features. Anchors come divided by
the temperature, so that a logit is the plain dot product :math:`s_{ij} = q_i \\cdot k_j`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Ids = tuple[Tensor, Tensor] | None
"""Instances of the anchors ``(N,)`` and of the keys ``(c,)``: where they are equal, the key is not a negative."""


def hide_own(block: Tensor, ids: Ids, value: float) -> Tensor:
    """Write ``value`` where the key is of the anchor's own instance: -inf over logits, 0 over their exponentials.

    The latter wherever no largest logit is asked for: on a CPU exp of -inf takes ten times as long as any other.
    """
    return block if ids is None else block.masked_fill_(ids[0][:, None] == ids[1][None, :], value)


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

    def exponentials(self, logits: Tensor, ids: Ids) -> Tensor:
        """:math:`e^{s_{ij} - r_i}`, 0 for own keys, in the place of ``logits (N, c)``; the reference rises before."""
        if self.reference is None:
            return hide_own(logits.exp_(), ids, 0.0)
        hide_own(logits, ids, -torch.inf)
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


@runtime_checkable
class Kernel(Protocol):
    """A module with these two functions."""

    def accumulate(self, sums: Sums, q: Tensor, keys: Tensor, ids: Ids) -> None:
        """Add the keys ``(c, d)`` to the sums of the anchors ``q (N, d)``."""

    def key_gradient(self, q: Tensor, keys: Tensor, lse: Tensor, ids: Ids) -> Tensor:
        r"""The ``(c, d)`` rows :math:`\sum_i e^{s_{ij} - \mathrm{lse}_i} q_i` over the anchors that see key ``j``."""
