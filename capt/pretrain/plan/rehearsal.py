"""A task without its data, rehearsed: its step, or its contrast alone, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.traits import using
from capt.pretrain.config.schema import Job, OptimizerSection
from capt.pretrain.contrastive.task import ContrastTask
from capt.pretrain.contrastive.term import ContrastTerm
from capt.pretrain.contrastive.views import Views
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.optim.build import freeze
from capt.pretrain.engine.optim.muon import muon_groups, orthogonalize_flops
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.plan.simulated import OnTheHost, OpTracer, Sent, Wire, Work, rank_of
from capt.pretrain.registry import task_module

TEMPERATURE = 0.05


class UnplannedError(ConfigError):
    """A job that may well run, but cannot be predicted, for the ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: it cannot be planned; a run of a few steps tells its time (schedule.stop_after)")


class Rehearsal(NamedTuple):
    """A task without its data, as the module ``plan`` of its package makes it (``rehearse(job, world)``).

    Where the module has ``completed(job)``, the job is that first, with the sizes that something else than it decides.

    Attributes:
        task: a `Task` whose ``build_modules``, ``optimizers``, ``step`` and ``flops_per_step`` need no data.
        batch: a micro-batch of this rank, of the shapes that training has.
        assumed: sizes that the data decide, and what is taken instead.
        longest: true where every row of the batch is as long as it may be, which few rows of the data are.
    """

    task: Any
    batch: Any
    assumed: tuple[str, ...] = ()
    longest: bool = False


def _planner(job: Job) -> Any:
    """The module ``plan`` of a task's package. Raises `UnplannedError` where it has none."""
    module = task_module(job.task.type, "plan")
    if module is None:
        raise UnplannedError(f"task.type {job.task.type}: its package has no module plan")
    return module


def completed(job: Job) -> Job:
    """Return the job with the sizes that something else than it decides, such as ``model.init``.

    Raises:
        ConfigError: the task cannot be planned, or the job is one that its start would refuse.
    """
    complete: Callable[[Job], Job] = getattr(_planner(job), "completed", lambda same: same)
    return complete(job)


def rehearse(job: Job, world: int) -> Rehearsal:
    """The task of a job without its data. Raises ``ConfigError`` where it cannot be planned."""
    with using(OnTheHost()):  # which may not have the device's types
        found: Rehearsal = _planner(job).rehearse(job, world)
    return found


@dataclass(frozen=True)
class Simulated(Work):
    """Work, memory and traffic of one rank in a simulated part of a step.

    Attributes:
        sent: every collective, in order.
        before: bytes that lived before.
        peak: the largest number of bytes that lived.
        queue: bytes of this rank's rows and ids.
        first: work of one pass without a graph, of the two of a micro-batch of a cached contrast.
    """

    sent: tuple[Sent, ...] = ()
    before: int = 0
    peak: int = 0
    queue: int = 0
    first: Work = field(default_factory=Work)

    @classmethod
    def of(cls, tracer: OpTracer, wire: Wire, **others: Any) -> Simulated:
        """Return the counts of ``tracer`` and ``wire`` since the last reset, with ``others`` of the attributes."""
        return cls(**vars(tracer.work), sent=tuple(wire.sent), **others)

    @property
    def received(self) -> int:
        """Bytes that this rank receives."""
        return sum(each.received for each in self.sent)


def simulate_step(
    job: Job, world: int, rank: int = 0, *, gpu: bool = True
) -> tuple[Simulated, dict[str, int], Rehearsal]:
    """Simulate a step without its update; return it, the bytes that lived at marked points, and what was simulated.

    Gradients stay where they are: averaging and updating them is the engine's, whose traffic and state are formulas.
    """
    parts = job.accumulation(world)
    rehearsal = rehearse(job, world)
    task: Any = rehearsal.task
    with rank_of(world, rank, gpu=gpu), OpTracer() as tracer:
        with _weights_of_16_bits() if job.engine.casts_weights else nullcontext(), _keep_modules_in_place():
            modules = task.build_modules()
        weights = sum(p.numel() for module in modules.values() for p in module.parameters())
        marks = {"weights": 4 * weights}
        marks |= _count_update(modules, {name: each.section for name, each in task.optimizers().items()}, job.optimizer)
        term = getattr(task, "contrast", None)
        queued = task if term is None else term
        marks["queue"] = fill_queue(queued, task.width) if getattr(queued, "queue", None) is not None else 0
        before = tracer.live
        tracer.reset()
        with Wire() as wire, _measured(task, tracer, marks) as passes:
            engines: dict[str, Any] = {
                name: _Gradients(name, module, job, parts)  # type: ignore[abstract]  # nothing else is asked for
                for name, module in modules.items()
            }
            # The same tensors each time, for they hold no values.
            task.step(engines, [rehearsal.batch] * parts, Progress())
        # `_measured` begins a new peak at the contrast: that of the step is the largest of all.
        outside = marks["peak outside the contrast"] = max(tracer.peak, marks.get("peak before the contrast", 0))
        peak = marks["peak of the step"] = max(outside, marks.get("peak of the contrast", 0))
        first = passes[0] if passes else Work()
        return Simulated.of(tracer, wire, before=before, peak=peak, queue=marks["queue"], first=first), marks, rehearsal


def _count_update(
    modules: Mapping[str, nn.Module], sections: Mapping[str, OptimizerSection], usual: OptimizerSection
) -> dict[str, int]:
    """Freeze what the job freezes; count elements that are trained, their moments, and operations of their update."""
    found = dict.fromkeys(("trained", "moments", "update"), 0)
    for name, module in modules.items():
        section = sections.get(name, usual)
        freeze(module, section)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        matrices: list[Tensor] = muon_groups(module, 0.0)[0][0]["params"] if section.type == "muon" else []
        found["trained"] += trained
        found["moments"] += section.moments(trained, sum(p.numel() for p in matrices))
        found["update"] += sum(orthogonalize_flops(*p.shape) for p in matrices)
    return found


def simulate_contrast(
    job: Any, width: int, world: int, rank: int = 0, *, gpu: bool = True, task: Any = None
) -> Simulated:
    """`contrast_step` of one simulated rank; ``task`` has a `build_term` and may have views of its own to contrast."""
    with rank_of(world, rank, gpu=gpu):
        return contrast_step(job, width, task=task)


def contrast_step(job: Any, width: int, *, task: Any = None) -> Simulated:
    """The contrast of a step of this rank, simulated or real: forward, backward and push; the encoder is left out.

    The queue is full. The representations of the rank's samples are leaves, as in a cached step. Without
    ``contrast.cached`` the micro-batches are contrasted one after the other.
    """
    section, world = job.contrast, distributed.world_size()
    sizes = contrast_sizes(job, world)
    with OpTracer() as tracer:
        term = ContrastTerm(section, width, job.batch.global_) if task is None else task.build_term()
        fill_queue(term, width)
        stored = tracer.live
        views = [getattr(task, "contrasted_views", plain_views)(k, width) for k in sizes]
        tracer.reset()
        before = tracer.live
        with Wire() as wire:
            for each in views:
                term.loss(each, step=section.queue_start).backward()
        return Simulated.of(tracer, wire, before=before, peak=tracer.peak, queue=stored)


def contrast_sizes(job: Any, world: int) -> list[int]:
    """Return the numbers of samples of a rank that are contrasted together in a step."""
    n, parts = job.micro_batch(world), job.accumulation(world)
    return [n * parts] if job.contrast.is_cached(parts) else [n] * parts


def fill_queue(term: Any, width: int) -> int:
    """Fill the ``queue`` of a term or task, and return the bytes of this rank's rows and ids."""
    if term.queue is None:
        return 0
    size = term.queue.shard_size
    # No sample of a batch has such an id.
    term.queue.enqueue(F.normalize(torch.randn(size, width), dim=1), ids=torch.arange(size) + (1 << 40))
    return int(size * (width * term.queue.rows.element_size() + 8))


def plain_views(count: int, width: int) -> Views:
    """Both views of ``count`` samples, as leaves."""
    return Views(leaf_rows(count, width), leaf_rows(count, width), torch.arange(count), TEMPERATURE)


def leaf_rows(count: int, width: int) -> Tensor:
    """Unit rows that collect gradients."""
    return F.normalize(torch.randn(count, width), dim=1).requires_grad_()


@contextmanager
def _weights_of_16_bits() -> Iterator[None]:
    """Make modules in the type that the engine casts them to: a tensor without data cannot be cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _keep_modules_in_place() -> Iterator[None]:
    """Leave modules where they are: peft moves its adapters, and torch cannot move parameters without data."""
    move = nn.Module.to
    nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.to = move  # type: ignore[method-assign]


@contextmanager
def _measured(task: Any, tracer: OpTracer, marks: dict[str, int]) -> Iterator[list[Work]]:
    """Mark the bytes around the contrast and of a micro-batch's graph; yield the work of each pass without a graph."""
    passes: list[Work] = []
    if not isinstance(task, ContrastTask):
        yield passes
        return
    represent, losses, term = task.represent, task.losses, task.contrast

    def pass_without_graph(*args: Any) -> Any:
        # The tracer is not reset within a step: this pass is a difference of its counts.
        before = tracer.work
        views = represent(*args)
        passes.append(tracer.work - before)
        return views

    def pass_with_graph(*args: Any) -> Any:
        before = tracer.live
        values = losses(*args)
        # All graphs are alike: the first one is noted.
        marks.setdefault("graph", tracer.live - before)
        return values

    def contrast(plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        marks["peak before the contrast"] = max(tracer.peak, marks.get("peak before the contrast", 0))
        marks["when the contrast begins"] = tracer.peak = tracer.live
        value = plain(*args, **kwargs)
        marks["peak of the contrast"] = max(tracer.peak, marks.get("peak of the contrast", 0))
        tracer.peak = tracer.live
        return value

    watched = nullcontext() if term is None else _instead(term, loss=partial(contrast, term.loss))
    with watched, _instead(task, represent=pass_without_graph, losses=pass_with_graph):
        yield passes


@contextmanager
def _instead(watched: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Let an object call ``methods`` in place of those of its class until the block ends."""
    vars(watched).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(watched)[name]


class _Gradients(Engine):
    """The part of an engine that a simulated step needs: forward in the job's precision, backward, no update."""

    name, zero_stage, at_boundary = "", 0, True

    def __init__(self, name: str, module: nn.Module, job: Job, parts: int) -> None:
        self.name = name
        self._module = module.train()
        self._low = job.engine.precision != "fp32" and not job.engine.casts_weights
        self._settings = ModuleOptimizer(job.optimizer)
        self._optimizer = torch.optim.SGD(module.parameters())  # has no state; nothing is updated
        self._parts = parts

    @property
    def optimizer_settings(self) -> ModuleOptimizer:
        return self._settings

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16) if self._low else nullcontext():
            return self._module(*args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        (loss / self._parts if self._parts > 1 else loss).backward()

    def step(self, loss: Tensor | None = None) -> None:
        """No update."""

    def gradient_norm(self) -> Tensor:
        return torch.tensor(0.0)  # a constant, which can be read among tensors without data
