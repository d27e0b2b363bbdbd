"""The seam of the task: how an update moves the tables. Plain skip-gram is one rule, a generator another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from pretrain.embeddings.data.positives import Segments
from pretrain.embeddings.initial import InitialVectors
from pretrain.engine.engines.base import Engine
from pretrain.engine.optim.settings import ModuleOptimizer
from pretrain.engine.task import StepMetrics


@runtime_checkable
class UpdateRule(Protocol):
    """What the task asks of a rule; all methods are called by all ranks alike."""

    status: str
    """What the progress line says behind the figures, such as that the generator has collapsed; mostly nothing."""

    def modules(self, initial: InitialVectors | None) -> Mapping[str, nn.Module]:
        """The modules beside ``discriminator``, initialised from the seed, or from the vectors to begin with."""
        ...

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """The optimizers of modules that are not updated as the section ``optimizer`` says."""
        ...

    def batches(self, read: Callable[[int], Segments], step: int) -> Iterator[Any]:
        """What the updates from ``step`` (from 0) on are given; ``read`` returns this rank's segments of an update."""
        ...

    def update(self, engines: Mapping[str, Engine], batch: Any, step: int, *, measure: bool) -> StepMetrics | None:
        """Do update ``step`` on what :meth:`batches` has yielded for it; with ``measure`` return its metrics.

        The loss is summed over pairs and ranks for the gradient. The mean over ranks of a metric is its global value;
        ``loss`` is in nats for each pair.
        """
        ...
