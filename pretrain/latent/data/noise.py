"""All that a step draws, for the whole batch and on every rank: so that no number depends on how ranks share it.

A batch is a few dozen sentences over all ranks; each rank draws for all of them (a few milliseconds) and uses its rows.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pretrain.engine.seeding import derive


class StepNoise:
    """Draws of one step, in the order of the calls.

    Args:
        seed: of the run.
        step: of the run (or any other names that tell one use from another).
        rows: this rank's rows of the batch; None for all.
        total: rows of the whole batch.
        device: where draws are used. They are made on the CPU, so that devices agree.
    """

    def __init__(
        self, seed: int, step: tuple[int | str, ...], rows: Int[Tensor, " n"] | None, total: int, device: torch.device
    ) -> None:
        self.generator = torch.Generator().manual_seed(derive(seed, "latent", *step))
        self._seed, self._step = seed, step
        self._rows = None if rows is None or torch.equal(rows, torch.arange(total)) else rows
        self._total, self._device = total, device

    def normal(self, views: int, *shape: int) -> Tensor:
        """Standard normal numbers, ``(views * n, *shape)``, view by view."""
        return self._own(torch.randn(views, self._total, *shape, generator=self.generator))

    def uniform(self, views: int, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), ``(views * n, *shape)``, view by view."""
        return self._own(torch.rand(views, self._total, *shape, generator=self.generator))

    def keep(self, p: float, views: int, length: int, width: int) -> Tensor | None:
        """Dropout of probability ``p`` (to 1/65536) on sequences, as factors 0 and ``1 / (1 - p)``; None for p = 0.

        Shape ``(length, views * n, width)``: time first, as the LSTM reads. From two random bytes each: bits are ten
        times as fast as torch's Bernoulli draws on a CPU, and there are a million a step.
        """
        if p == 0.0:
            return None
        shape = (length, views, self._total, width)
        bits = np.frombuffer(self._random.bytes(2 * math.prod(shape)), dtype=np.uint16)
        kept = torch.from_numpy(bits >= round(p * 65536)).view(shape)
        if self._rows is not None:
            kept = kept[:, :, self._rows]
        return kept.flatten(1, 2).to(self._device, torch.float32).mul_(1.0 / (1.0 - p))

    def shared(self, number: int, width: int, rank: int, world: int) -> Float[Tensor, "m width"]:
        """This rank's share of ``number`` standard normal vectors that belong to no row."""
        return torch.randn(number, width, generator=self.generator)[rank::world].to(self._device)

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(derive(self._seed, "latent/keep", *self._step)))

    def _own(self, drawn: Tensor) -> Tensor:
        if self._rows is not None:
            drawn = drawn[:, self._rows]
        return drawn.flatten(0, 1).to(self._device)
