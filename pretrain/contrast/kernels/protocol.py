"""What a kernel provides: the arithmetic that one rank does on the keys it holds.

Shapes: ``N`` anchors (gathered from all ranks), ``c`` keys (held by this rank), ``d`` features. Anchors come divided by
the temperature, so that a logit is the plain dot product :math:`s_{ij} = q_i \\cdot k_j`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

Ids = tuple[Tensor, Tensor] | None
"""Instances of the anchors ``(N,)`` and of the keys ``(c,)``: where they are equal, the key is not a negative."""


@runtime_checkable
class Kernel(Protocol):
    """A module with these two functions."""

    def accumulate(self, sums: Tensor, reference: Tensor | None, q: Tensor, keys: Tensor, ids: Ids) -> None:
        r"""Add this rank's keys to the rows :math:`[\sum_j e^{s_{ij}-r_i} k_j \mid \sum_j e^{s_{ij}-r_i}]` of ``sums``.

        ``sums`` is ``(N, d+1)``, or ``(N, 1)`` where only the normaliser is wanted. ``reference (N,)`` holds
        :math:`r_i`, the largest logit seen so far, and is raised in place; ``None`` means :math:`r_i = 0`.
        """

    def key_gradient(self, q: Tensor, keys: Tensor, lse: Tensor, ids: Ids) -> Tensor:
        r"""The ``(c, d)`` rows :math:`\sum_i e^{s_{ij} - \mathrm{lse}_i} q_i` over the anchors that see key ``j``."""
