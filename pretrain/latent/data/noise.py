"""The random numbers of one training step or one evaluation batch, the same for any number of ranks.

A batch is a few dozen sentences over all ranks. Each rank draws the numbers of the whole batch (a few milliseconds) and
uses those of its own rows, so that no number depends on how the rows are shared out.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pretrain.base.randomness import derive


class StepNoise:
    """Random numbers of one step; the order of the calls decides what each call returns.

    Args:
        seed: the run's seed.
        step: the step's number, or any other names that tell one use from another.
        rows: this rank's rows of the batch; None for all of them.
        total: number of rows of the whole batch.
        device: where the numbers are used. They are drawn on the CPU, so that every device gets the same ones.
    """

    def __init__(
        self, seed: int, step: tuple[int | str, ...], rows: Int[Tensor, " n"] | None, total: int, device: torch.device
    ) -> None:
        self.generator = torch.Generator().manual_seed(derive(seed, "latent", *step))
        self._seed, self._step = seed, step
        self._rows = None if rows is None or torch.equal(rows, torch.arange(total)) else rows
        self._total, self._device = total, device

    def normal(self, views: int, *shape: int) -> Tensor:
        """Standard normal numbers, ``(views * n, *shape)``, view after view."""
        return self._own_rows(torch.randn(views, self._total, *shape, generator=self.generator))

    def uniform(self, views: int, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), ``(views * n, *shape)``, view after view."""
        return self._own_rows(torch.rand(views, self._total, *shape, generator=self.generator))

    def dropout(self, p: float, views: int, length: int, width: int) -> Float[Tensor, "length vn width"] | None:
        """Dropout of probability ``p`` (to 1/65536) on sequences as factors 0 and ``1 / (1 - p)``; None for p = 0.

        Time comes first, as the LSTM reads. Each factor is made of two random bytes: on a CPU this is ten times as fast
        as torch's Bernoulli draws, and a step needs a million of them.
        """
        if p == 0.0:
            return None
        shape = (length, views, self._total, width)
        bits = np.frombuffer(self._bytes.bytes(2 * math.prod(shape)), dtype=np.uint16)
        kept = torch.from_numpy(bits >= round(p * 65536)).view(shape)
        if self._rows is not None:
            kept = kept[:, :, self._rows]
        return kept.flatten(1, 2).to(self._device, torch.float32).mul_(1.0 / (1.0 - p))

    def normal_shared(self, number: int, width: int, rank: int, world: int) -> Float[Tensor, "m width"]:
        """This rank's part of ``number`` standard normal vectors that belong to no row of the batch."""
        return torch.randn(number, width, generator=self.generator)[rank::world].to(self._device)

    @cached_property
    def _bytes(self) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(derive(self._seed, "latent/keep", *self._step)))

    def _own_rows(self, values: Tensor) -> Tensor:
        if self._rows is not None:
            values = values[:, self._rows]
        return values.flatten(0, 1).to(self._device)
