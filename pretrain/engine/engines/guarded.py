"""What comes before an update: checks of what it reads, and whether it is to be made, by its loss and gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Judge = Callable[[Tensor | None, Tensor | None], bool]
"""The loss of a step on this rank and its global gradient norm, where they are known -> whether to leave the update
out. Called on all ranks together; they must agree."""


class UpdateGuard:
    """The judge of an engine's updates, if it has one, and the loss of the update that is coming."""

    def __init__(self, accumulation: int) -> None:
        self._accumulation = accumulation
        self._loss: Tensor | None = None
        self.judge: Judge | None = None
        self.check: Callable[[], None] | None = None
        """Called on all ranks at the end of the last backward pass, before anything of the update is done."""
        self.vetoed = False
        """Whether the last update was left out."""

    def add(self, loss: Tensor | None) -> None:
        """Note the loss of a micro-batch."""
        if self.judge is not None and loss is not None:
            part = loss.detach() / self._accumulation
            self._loss = part if self._loss is None else self._loss + part

    @contextmanager
    def update(self) -> Iterator[None]:
        """The end of the last micro-batch: a scaler of the loss may leave the update out before the judge is asked."""
        self.vetoed = False
        if self.check is not None:
            self.check()
        yield
        self._loss = None

    def vetoes(self, norm: Tensor | None) -> bool:
        """Whether the update is to be left out. Called at most once an update, on all ranks, within `update`."""
        if self.judge is None:
            return False
        self.vetoed = self.judge(self._loss, norm)
        return self.vetoed


@contextmanager
def without_update(zero: Any) -> Iterator[None]:
    """Let ``step`` of DeepSpeed's ZeRO 1 to 3 end as after an overflow: no update, no gradients left.

    The loss scale, which an overflow lowers, stays.
    """

    def overflow(*args: Any, **kwargs: Any) -> bool:
        zero.overflow = True
        return True

    said = {
        "check_grad_overflow": True,  # ZeRO 1 and 2 ask only then
        "check_overflow": overflow,
        "_overflow_check_and_loss_scale_update": overflow,  # ZeRO 3
        "_update_scale": lambda overflow: None,
    }
    before = {name: vars(zero)[name] for name in said if name in vars(zero)}
    vars(zero).update(said)
    try:
        yield
    finally:
        for name in said:
            del vars(zero)[name]
        vars(zero).update(before)
