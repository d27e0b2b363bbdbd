"""The interface of a kernel: the arithmetic that one rank does for all anchors on the keys that it holds.

Shapes: ``N`` anchors (gathered from all ranks), ``c`` keys (held by this rank), ``d`` features. Anchors come divided by
the temperature, so that a logit is the plain dot product :math:`s_{ij} = q_i \\cdot k_j`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pretrain.contrast.kernels.products import Products


class InstanceIds:
    """Instance ids of anchors ``(N,)`` and of keys ``(c,)``; a key with the anchor's id is not a negative."""

    def __init__(self, anchors: Tensor, keys: Tensor) -> None:
        self.anchors, self.keys = anchors, keys
        self._negative_mask: Tensor | None = None

    def block(self, rows: slice, columns: slice) -> InstanceIds:
        """The ids of one block of anchors x keys."""
        return InstanceIds(self.anchors[rows], self.keys[columns])

    def equal(self) -> Tensor:
        """``(N, c)``, true where key and anchor are of one instance."""
        return self.anchors[:, None] == self.keys[None, :]

    def own_keys(self) -> Tensor:
        """``(N,)``, how many keys are of the anchor's instance; no tensor of N x c."""
        keys = self.keys.sort().values
        return torch.searchsorted(keys, self.anchors, right=True) - torch.searchsorted(keys, self.anchors)

    @property
    def negative_mask(self) -> Tensor:
        """``(N, c)``, 1 where the key is a negative and 0 elsewhere: a factor of exponentials.

        In fp32 on a CPU, which multiplies numbers ten times as fast as it fills by a mask, and in bytes on a GPU.
        """
        if self._negative_mask is None:
            dtype = torch.float32 if self.anchors.is_cpu else torch.bool
            mask = torch.empty(len(self.anchors), len(self.keys), dtype=dtype, device=self.anchors.device)
            self._negative_mask = torch.ne(self.anchors[:, None], self.keys[None, :], out=mask)
        return self._negative_mask


@dataclass(frozen=True)
class SoftmaxSums:
    r"""The running sums of an online softmax over keys, one row per anchor, updated in place.

    Attributes:
        normaliser: ``(N,)``, :math:`\sum_j e^{s_{ij} - r_i}`.
        weighted_keys: ``(N, d)``, :math:`\sum_j e^{s_{ij} - r_i} k_j`; ``None`` where no gradient is wanted.
        running_max: ``(N,)``, :math:`r_i`, the largest logit so far; ``None`` for :math:`r_i = 0`, which is right for
            logits of bounded size.
        squares: ``(N,)``, :math:`\sum_j e^{2 (s_{ij} - r_i)}`; ``None`` where no diagnostics are wanted.
        largest: ``(N,)``, the largest logit so far, for diagnostics of weighted keys, whose :math:`r_i` is that of the
            weighted terms; ``None`` where it is not wanted, or is the running maximum.
    """

    normaliser: Tensor
    weighted_keys: Tensor | None
    running_max: Tensor | None
    squares: Tensor | None = None
    largest: Tensor | None = None

    def __getitem__(self, rows: slice) -> SoftmaxSums:
        """The sums of some anchors; a view, so that adding to it adds to these."""
        weighted_keys = None if self.weighted_keys is None else self.weighted_keys[rows]
        return SoftmaxSums(
            self.normaliser[rows],
            weighted_keys,
            None if self.running_max is None else self.running_max[rows],
            None if self.squares is None else self.squares[rows],
            None if self.largest is None else self.largest[rows],
        )

    def exponentials(self, logits: Tensor, ids: InstanceIds | None) -> Tensor:
        """Overwrite ``logits (N, c)`` with :math:`e^{s_{ij} - r_i}`, 0 for keys of the anchor's own instance.

        A running maximum is raised to these logits first.
        """
        if self.running_max is None:
            return logits.exp_() if ids is None else logits.exp_().mul_(ids.negative_mask)
        if ids is not None:
            logits.masked_fill_(ids.equal(), -torch.inf)
        highest = logits.amax(1)
        if self.largest is not None:
            torch.maximum(self.largest, highest, out=self.largest)
        return logits.sub_(self.rescale(highest)[:, None]).exp_()

    def add(self, exponentials: Tensor) -> None:
        """Add the exponentials ``(N, c)`` of more keys to the sums of numbers; the kernel adds the weighted keys."""
        self.normaliser.add_(exponentials.sum(1))
        if self.squares is not None:
            self.squares.add_(exponentials.square().sum(1))

    def weigh(self, factor: Tensor) -> None:
        """Multiply what has been added so far by ``factor``, one for each anchor or for all of them."""
        self.normaliser.mul_(factor)
        if self.weighted_keys is not None:
            self.weighted_keys.mul_(factor if factor.ndim == 0 else factor[:, None])
        if self.squares is not None:
            self.squares.mul_(factor.square())

    def rescale(self, logits: Tensor) -> Tensor:
        """Raise the running maximum to ``logits (N,)`` where these are larger, scale the sums to it, and return it."""
        assert self.running_max is not None
        maximum = torch.maximum(self.running_max, logits)
        self.weigh(torch.exp(self.running_max - maximum))
        return self.running_max.copy_(maximum)


def probabilities(logits: Tensor, lse: Tensor, ids: InstanceIds | None) -> Tensor:
    r"""Overwrite ``logits (N, c)`` with :math:`e^{s_{ij} - \mathrm{lse}_i}`, 0 for keys of the anchor's own instance.

    A negative's logit is never above ``lse (N,)``, but that of an own key, which is not in it, may be.
    """
    below = logits.sub_(lse[:, None])
    return below.exp_() if ids is None else below.clamp_max_(0.0).exp_().mul_(ids.negative_mask)


@runtime_checkable
class Kernel(Protocol):
    """A module with these two functions."""

    def accumulate(
        self, sums: SoftmaxSums, q: Tensor, keys: Tensor, ids: InstanceIds | None, products: Products
    ) -> None:
        """Add the keys ``(c, d)`` to the sums of the anchors ``q (N, d)``."""

    def key_gradient(self, q: Tensor, keys: Tensor, lse: Tensor, ids: InstanceIds | None, products: Products) -> Tensor:
        r"""The ``(c, d)`` rows :math:`\sum_i e^{s_{ij} - \mathrm{lse}_i} q_i` over the anchors that see key ``j``."""
