"""What a rank must tell the others in every step, told without anybody waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.base import distributed

LAG = 2
"""Steps between a flag's post and its reading: as far as the host may run ahead of the device and of other ranks."""


@dataclass
class _Posted:
    step: int
    numbers: Tensor
    work: Any = None
    host: Tensor | None = None
    copied: torch.cuda.Event | None = None


class Flags:
    """Sums over the ranks of a few numbers a step, which every rank reads :data:`LAG` steps later.

    A row of numbers is reduced where it lies, in the background, and copied to the host beside the work of the device;
    by the time it is read it has long been there. A rank alone on a CPU has nobody to wait for: ``lag`` is 0 there.
    """

    def __init__(self) -> None:
        self.device = distributed.device()
        self._side = torch.cuda.Stream() if self.device.type == "cuda" else None
        self._posted: deque[_Posted] = deque()
        self.lag = LAG if self._side is not None or distributed.world_size() > 1 else 0

    def post(self, step: int, numbers: Tensor) -> None:
        """Tell the others; ``numbers`` is float32 of one length on all ranks, on ``device``. A collective."""
        posted = _Posted(step, numbers)
        if distributed.world_size() > 1:
            posted.work = dist.all_reduce(numbers, async_op=True)
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                if posted.work is not None:
                    posted.work.wait()  # has this stream wait, not the host
                posted.host = torch.empty_like(numbers, device="cpu", pin_memory=True)
                posted.host.copy_(numbers, non_blocking=True)
                posted.copied = torch.cuda.Event()
                posted.copied.record()
        self._posted.append(posted)

    def read(self, until: int) -> Iterator[tuple[int, list[float]]]:
        """Step and sums of each post of a step up to ``until``, once, the oldest first. Waits for the last of them.

        Every rank must read the same posts after the same step.
        """
        while self._posted and self._posted[0].step <= until:
            posted = self._posted.popleft()
            if posted.copied is not None:
                posted.copied.synchronize()
            elif posted.work is not None:
                posted.work.wait()
            host = posted.numbers if posted.host is None else posted.host
            yield posted.step, host.numpy().tolist()
