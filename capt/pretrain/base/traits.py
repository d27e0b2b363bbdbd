"""Traits of the device where processors and GPUs differ, and where a tensor may have no values.

Kernels, layers and heads ask `traits()`. A plan answers for a device that is not here (`capt.pretrain.plan.simulated`),
with tensors that have shapes and no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class DeviceTraits:
    """The devices that tensors are on, and their values.

    Attributes:
        is_here: whether the device that the code computes for is the one that it runs on.
        has_values: whether tensors hold numbers; without, nothing may depend on them.
        adds_products: whether torch adds a product of 16 bits to a sum of 32 bits in one operator.
        attend_runs: attention of sequences that are laid end to end, ``(qkv, longest, window)``, in place of the
            kernels of `capt.pretrain.models.modernbert.attention`; None: these.
    """

    is_here = True
    has_values = True
    adds_products = True
    attend_runs: Callable[[Tensor, int, int | None], Tensor] | None = None

    def gpu_is_here(self) -> bool:
        """Return true where this process has a GPU and may use it."""
        return torch.cuda.is_available()

    def is_gpu(self, device: torch.device) -> bool:
        """Return true where code takes the side of a GPU for tensors on ``device``."""
        return device.type != "cpu"

    def can_read(self, values: Tensor) -> bool:
        """Return true where the host may read ``values`` without waiting for a stream or breaking a compiled graph."""
        return not torch.compiler.is_compiling() and self.has_values and not self.is_gpu(values.device)

    def blocks(self, length: int, size: int) -> Iterator[slice]:
        """Cut ``length`` rows into blocks of ``size``; the last one may have fewer."""
        for begin in range(0, length, size):
            yield slice(begin, min(begin + size, length))


_current = DeviceTraits()


def traits() -> DeviceTraits:
    """Return the traits in force."""
    return _current


@contextmanager
def using(chosen: DeviceTraits) -> Iterator[None]:
    """Put ``chosen`` in force until the block ends."""
    global _current
    before, _current = _current, chosen
    try:
        yield
    finally:
        _current = before
