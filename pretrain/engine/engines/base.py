"""What a task sees of a module under training, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pretrain.engine.engines.guarded import Judge
from pretrain.engine.optim.settings import ModuleOptimizer


@runtime_checkable
class Engine(Protocol):
    """A module with its optimizer: forward by calling it, then ``backward`` and ``step`` once a micro-batch.

    Every forward pass of training goes through the engine, never through ``.module`` (DeepSpeed's gradient hooks are
    installed by its forward). Gradients are averaged over micro-batches and over ranks.
    """

    @property
    def name(self) -> str:
        """Its name among the task's modules."""
        ...

    @property
    def zero_stage(self) -> int:
        """What ZeRO shards: 0 nothing, 1 the optimizer's state, 2 the gradients as well, 3 the weights as well."""
        ...

    @property
    def optimizer_settings(self) -> ModuleOptimizer:
        """How the module is updated; the loop takes the learning rate of each update from here."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, in the precision of ``engine.precision``."""
        ...

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Accumulate the gradient of ``loss``, a scalar: the loss of one micro-batch.

        With ``last`` false, another backward pass of the same micro-batch follows.
        """
        ...

    def step(self, loss: Tensor | None = None) -> None:
        """End a micro-batch; the last one of an optimizer step clips the gradient and updates the parameters.

        ``loss`` is what the task reports of the micro-batch, by which a guard judges the update (`guard`).
        """
        ...

    def guard(self, judge: Judge) -> None:
        """Ask ``judge`` before each update whether it is to be left out: parameters and moments stay as they are."""
        ...

    def before_update(self, check: Callable[[], None]) -> None:
        """Call ``check`` at the end of the backward pass of each update, on all ranks together; it may raise."""
        ...

    def update_was_vetoed(self) -> bool:
        """Whether the last update was left out because its judge said so."""
        ...

    def train(self) -> None:
        """Switch to training mode (dropout on)."""
        ...

    def eval(self) -> None:
        """Switch to evaluation mode (dropout off)."""
        ...

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of the next update, for every parameter group."""
        ...

    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        ...

    def gradient_norm(self) -> Tensor:
        """Global gradient norm of the last update, before clipping: a scalar that the host has not waited for."""
        ...

    def update_was_skipped(self) -> bool:
        """Whether the last update was left out because fp16 overflowed (the loss scale has been lowered)."""
        ...

    @property
    def module(self) -> nn.Module:
        """The module, for reading (names, shapes) and for evaluation; not for training passes."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that inputs belong on."""
        ...

    @property
    def at_boundary(self) -> bool:
        """Whether this micro-batch is the last of its optimizer step."""
        ...

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that ``build_optimizer`` made, which holds the state."""
        ...

    @property
    def zero_optimizer(self) -> Any:
        """DeepSpeed's wrapper around the optimizer at ZeRO 1 to 3; the optimizer itself elsewhere."""
        ...

    def loss_scale_state(self) -> dict[str, Any]:
        """The state of fp16's dynamic loss scaler as JSON; empty in other precisions."""
        ...

    def load_loss_scale_state(self, state: Mapping[Any, Any]) -> None:
        """Restore a :meth:`loss_scale_state`; one of another kind of scaler gives only its scale."""
        ...
