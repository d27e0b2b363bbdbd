"""Implementations of :class:`~pretrain.contrast.kernels.protocol.Kernel`, by the name that ``impl`` gives."""

from __future__ import annotations

from pretrain.contrast.kernels import chunked, dense
from pretrain.contrast.kernels.protocol import Kernel

KERNELS: dict[str, Kernel] = {"chunked": chunked, "dense": dense}
