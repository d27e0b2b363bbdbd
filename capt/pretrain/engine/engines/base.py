"""Interface through which tasks see a module under training, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.optim.optimizers import AVERAGE
from capt.pretrain.engine.optim.settings import ModuleOptimizer


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
        """Parts that ZeRO shards: 0 nothing, 1 the optimizer's state, 2 also the gradients, 3 also the weights."""
        ...

    @property
    def optimizer_settings(self) -> ModuleOptimizer:
        """Optimizer settings of the module; the loop takes the learning rate of each update from here."""
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

    def accumulate(self, micro_batches: int) -> None:
        """Let the coming optimizer steps consist of this number of micro-batches. Called between two steps."""
        ...

    def guard(self, judge: Judge) -> None:
        """Ask ``judge`` before each update whether it is to be left out: parameters and moments stay as they are."""
        ...

    def before_update(self, check: Callable[[], None]) -> None:
        """Call ``check`` at the end of the backward pass of each update, on all ranks together; it may raise."""
        ...

    def update_was_vetoed(self) -> bool:
        """True if the last update was left out because its judge said so."""
        ...

    def train(self) -> None:
        """Switch to training mode (dropout on)."""
        ...

    def eval(self) -> None:
        """Switch to evaluation mode (dropout off)."""
        ...

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of the next update; a parameter group takes its ``lr_scale`` of it."""
        ...

    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        ...

    def gradient_norm(self) -> Tensor:
        """Global gradient norm of the last update, before clipping: a scalar that the host has not waited for."""
        ...

    def update_was_skipped(self) -> bool:
        """True if the last update was left out because fp16 overflowed (the loss scale has been lowered)."""
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
        """True if this micro-batch is the last of its optimizer step."""
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


# Measures and clips the gradients that are beside their parameters, dense or sparse.


def measure_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together, a scalar on their device; 0 where there are none.

    A sparse gradient is coalesced in place first: the norm is that of the sums of the entries of each row.
    """
    values = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            values.append(parameter.grad.values())
        elif parameter.grad is not None:
            values.append(parameter.grad)
    if not values:
        return torch.zeros(())
    # what nn.utils.get_total_norm does, without sorting tensors by device and type: half of its time in small modules
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    return norm


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm, now ``norm``, is at most ``largest`` (0 leaves them as they are)."""
    if largest:
        nn.utils.clip_grads_with_norm_(parameters, largest, norm)


# What comes before an update: checks of what it reads, and whether it is to be made, by its loss and gradient norm.


Judge = Callable[[Tensor | None, Tensor | None], bool]
"""The loss of a step on this rank and its global gradient norm, where they are known -> whether to leave the update
out. Called on all ranks together; they must agree."""


class UpdateGuard:
    """The judge of an engine's updates, if it has one, and the loss of the update that is coming."""

    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation
        """Micro-batches of an optimizer step."""
        self._loss: Tensor | None = None
        self.judge: Judge | None = None
        self.check: Callable[[], None] | None = None
        """Called on all ranks at the end of the last backward pass, before anything of the update is done."""
        self.vetoed = False
        """True if the last update was left out."""

    def add(self, loss: Tensor | None) -> None:
        """Note the loss of a micro-batch."""
        if self.judge is not None and loss is not None:
            part = loss.detach() / self.accumulation
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
        """Return whether the update is to be left out. Called at most once an update, on all ranks, within `update`."""
        if self.judge is None:
            return False
        self.vetoed = self.judge(self._loss, norm)
        return self.vetoed


class EngineBase:
    """Shared part of the engines: the learning rate, the count of micro-batches, and the guard of updates."""

    def __init__(self, name: str, job: Job, settings: ModuleOptimizer) -> None:
        self.name = name
        self.optimizer_settings = settings
        self._rate = settings.section.lr
        self._accumulation = job.accumulation(distributed.world_size())
        self._guard = UpdateGuard(self._accumulation)
        self._micro_steps = 0

    @property
    def at_boundary(self) -> bool:
        """True if this micro-batch is the last of its optimizer step."""
        return (self._micro_steps + 1) % self._accumulation == 0

    def guard(self, judge: Judge) -> None:
        """Ask ``judge`` before each update whether it is to be left out."""
        self._guard.judge = judge

    def before_update(self, check: Callable[[], None]) -> None:
        """Call ``check`` at the end of the backward pass of each update."""
        self._guard.check = check

    def update_was_vetoed(self) -> bool:
        """True if the last update was left out because its judge said so."""
        return self._guard.vetoed

    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self._rate


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
    # The instance's attributes hide the methods of the class; such as it had before are put back.
    before = {name: vars(zero)[name] for name in said if name in vars(zero)}
    vars(zero).update(said)
    try:
        yield
    finally:
        for name in said:
            del vars(zero)[name]
        vars(zero).update(before)


# Runs a module with the averages of its weights (:mod:`capt.pretrain.engine.optim.optimizers`), in any engine.


@contextmanager
def averaged_weights(engine: Engine) -> Iterator[None]:
    """Run the engine's module with the averages of its weights; afterwards the weights are the same bits as before.

    Only for passes without a graph, between updates, and not between a forward pass and its backward pass. Collective.
    Weights that were never updated are as they are. What raises within ends the run: the averages stay in place.

    At ZeRO 0 averages and weights change places and nothing is copied. At ZeRO 1 and 2 every rank casts its partition,
    and the partitions are gathered as after an update, in and out. At ZeRO 3 a rank puts its partition aside for as
    long, and weights that DeepSpeed keeps whole are gathered again.

    Raises:
        ConfigError: DeepSpeed updates some partitions with an optimizer of its own, which keeps no average.
    """
    if engine.zero_stage == 0:
        live = _exchange_whole(engine)
        yield
        for p, data in live.items():
            p.data = data
        return
    averages = _of_partitions(engine)
    if not averages:
        yield
    elif engine.zero_stage == 3:
        kept = [flat.clone() for flat in engine.zero_optimizer.fp16_partitioned_groups_flat]
        _fill_partitions(engine.zero_optimizer, averages)
        yield
        _fill_partitions(engine.zero_optimizer, kept)
    else:
        zero = engine.zero_optimizer
        # DeepSpeed casts and gathers what it takes for its master copies: for this call, the averages.
        masters = zero.single_partition_of_fp32_groups
        zero.single_partition_of_fp32_groups = averages
        zero.update_lp_params()
        zero.single_partition_of_fp32_groups = masters
        yield
        zero.update_lp_params()  # a weight is its master copy, cast


def _exchange_whole(engine: Engine) -> dict[Tensor, Tensor]:
    """Replace the data of every parameter that has an average by it, and return the former data."""
    state, live = engine.base_optimizer.state, dict[Tensor, Tensor]()
    for p in engine.module.parameters():
        if AVERAGE in state.get(p, {}):
            live[p], p.data = p.data, state[p][AVERAGE]
    return live


def _of_partitions(engine: Engine) -> list[Tensor]:
    """The averages of this rank's flat partitions; none before the first update."""
    zero, state = engine.zero_optimizer, engine.base_optimizer.state
    flats = zero.fp32_partitioned_groups_flat if engine.zero_stage == 3 else zero.single_partition_of_fp32_groups
    found = [state[flat][AVERAGE] for flat in flats if AVERAGE in state.get(flat, {})]
    if 0 < len(found) < len(flats):
        raise ConfigError(
            "contrast.momentum: DeepSpeed updates a part of the weights with an optimizer of its own, which keeps no "
            "average; leave out engine.deepspeed_extra.zero_optimization.offload_optimizer.ratio, or set "
            "contrast.momentum=null"
        )
    return found


def _fill_partitions(zero: Any, values: list[Tensor]) -> None:
    """Put values into the partitions that ZeRO 3 gathers weights from, between two passes."""
    zero.checkpoint_event_prologue()  # nothing is whole now
    for flat, value in zip(zero.fp16_partitioned_groups_flat, values, strict=True):
        flat.copy_(value)
    zero.checkpoint_event_epilogue()  # small weights are whole again, as after an update
