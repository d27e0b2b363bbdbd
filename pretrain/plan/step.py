"""A training step of one rank of a job, on tensors without data: what it sends, holds and computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.contrast import ContrastSection
from capt.pretrain.config.schema import Job, OptimizerSection
from capt.pretrain.contrastive.task import ContrastTask
from capt.pretrain.contrastive.term import ContrastTerm
from capt.pretrain.contrastive.views import Views
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.optim.build import freeze
from capt.pretrain.engine.optim.muon import muon_groups, orthogonalize_flops
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.plan.simulated import OpTracer, Sent, Wire, on_the_host, rank_of
from capt.pretrain.registry import task_module

TEMPERATURE = 0.05
LAYERS = 2
"""Layers, and one more, from which those of a deeper stack follow."""
_NEVER = 2**31 - 1


class UnplannedError(ConfigError):
    """A job that may well run, but of which nothing can be told before, for the ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: it cannot be planned; a run of a few steps tells its time (schedule.stop_after)")


class Rehearsal(NamedTuple):
    """A task without its data, as the module ``plan`` of its package makes it (``rehearse(job, world)``).

    Where the module has ``completed(job)``, the job is that first, with the sizes that something else than it decides.

    Attributes:
        task: a `Task` whose ``build_modules``, ``optimizers``, ``step`` and ``flops_per_step`` need no data.
        batch: a micro-batch of this rank, of the shapes that training has.
        assumed: what is not known before the data are read, and what is taken instead.
        longest: whether every row of the batch is as long as it may be, which few rows of the data are.
    """

    task: Any
    batch: Any
    assumed: tuple[str, ...] = ()
    longest: bool = False


@dataclass(frozen=True)
class Simulated:
    """What one rank does and holds in a simulated part of a step.

    Attributes:
        sent: every collective, in order.
        before: bytes that lived before.
        peak: the largest number of bytes that lived.
        queue: bytes of this rank's rows and ids.
        flops: of matrix products.
        moved: bytes read and written by all other operators.
        operators: kernels that are launched, about.
        flops_of: ``flops`` by the type of the factors.
        product_bytes: bytes read and written by the products.
        first: one pass without a graph, of the two of a micro-batch of a cached contrast.
    """

    sent: tuple[Sent, ...]
    before: int
    peak: int
    queue: int
    flops: int
    moved: int
    operators: int
    flops_of: Mapping[str, int] = field(default_factory=dict)
    product_bytes: int = 0
    first: Simulated | None = None

    @classmethod
    def of(cls, wire: Wire, tracer: OpTracer, before: int, queue: int) -> Simulated:
        """What ``tracer`` and ``wire`` have counted since the last reset."""
        return cls(
            tuple(wire.sent), before, tracer.peak, queue, tracer.flops, tracer.moved, tracer.operators,
            dict(tracer.flops_of), tracer.product_bytes,
        )  # fmt: skip

    @property
    def received(self) -> int:
        """Bytes that this rank receives."""
        return sum(each.received for each in self.sent)


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step, in the units that a device's rates are of.

    Attributes:
        flops_of: floating-point operations of matrix products, by type.
        moved: bytes read and written by the other operators.
        operators: that are started.
    """

    flops_of: Mapping[str, int | float]
    moved: int | float
    operators: int | float

    @classmethod
    def of(cls, found: Simulated) -> Work:
        """The work of a simulated part."""
        return cls(found.flops_of, found.moved, found.operators)

    @property
    def flops(self) -> int | float:
        """Operations of all types."""
        return sum(self.flops_of.values())

    def __add__(self, other: Work) -> Work:
        summed = Counter(dict(self.flops_of))
        summed.update(other.flops_of)
        return Work(dict(summed), self.moved + other.moved, self.operators + other.operators)

    def __sub__(self, other: Work) -> Work:
        return self + other * -1

    def __mul__(self, factor: int | float) -> Work:
        scaled = {name: factor * value for name, value in self.flops_of.items()}
        return Work(scaled, factor * self.moved, factor * self.operators)


@dataclass(frozen=True)
class RankStep:
    """A whole step of one rank, but for ZeRO's traffic and the update.

    Attributes:
        weights: elements of all parameters.
        trained: elements of those that are not frozen.
        moments: elements of the optimizer's state.
        update: operations of the update's products, those of Muon.
        encoder: work outside of the contrast, of all micro-batches.
        contrast: work of the contrast.
        sent: collectives of the task.
        encoder_peak: bytes that live at most outside of the contrast: weights, gradients, queue, activations; without
            what the optimizer keeps.
        queue: bytes of the queue among them.
        flops: model FLOP of a step over all ranks (`Task.flops_per_step`).
        tokens: of a step over all ranks; 0 for a task that does not count them.
        parts: micro-batches.
        cached: whether the contrast is cached.
        assumed: as of `Rehearsal`.
        again: work that is saved where a micro-batch keeps the graph of its first pass (`contrast.keep`).
        graph: bytes of such a graph.
        contrast_peak: bytes that live at most while the contrast is computed, without any.
        longest: as of `Rehearsal`.
    """

    weights: int
    trained: int
    moments: int
    update: int
    encoder: Work
    contrast: Work
    sent: tuple[Sent, ...]
    encoder_peak: int
    queue: int
    flops: float
    tokens: int
    parts: int
    cached: bool
    assumed: tuple[str, ...]
    again: Work
    graph: int
    contrast_peak: int
    longest: bool

    @property
    def peak(self) -> int:
        """Bytes that live at most. In the number of layers both parts are affine, and the larger of them is not."""
        return max(self.encoder_peak, self.contrast_peak)


Known = dict[str, Simulated]
"""Contrasts that have been simulated, which are the same whatever the encoder is, and however a rank cuts its part."""


@on_the_host()
def rank_step(job: Job, world: int, *, gpu: bool, known: Known | None = None) -> RankStep:
    """Simulate rank 0 of ``world`` in a step of ``job``. What ``known`` holds is not simulated again.

    Two micro-batches are simulated, which the others repeat. A cached contrast, which is one over all of them, is
    simulated by itself where there are more. Of a stack of equal layers (``model.layers``) the first few are
    simulated: work, weights and memory are affine in their number, or in that of their periods where kinds alternate.
    Those that ``optimizer.freeze`` names are among them.

    Where a rank has fewer rows than ``batch.micro``, or parts that differ by one, all are as large as the largest.

    Raises:
        ConfigError: the batch sizes do not fit ``world``, or the task cannot be planned.
    """
    job = completed(job)
    try:
        parts = job.accumulation(world)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    job = _quiet(_with_precision(job, "bf16" if gpu else "fp32"))
    job = _with_micro(job, -(-job.batch.global_ // (parts * world)))
    model = getattr(job, "model", None)
    layers, period = getattr(model, "layers", 0), getattr(model, "period", 1)
    frozen = job.optimizer.freeze if isinstance(job.optimizer.freeze, int) else 0
    least = LAYERS + frozen + (layers - LAYERS - frozen) % period
    known = {} if known is None else known
    if layers <= least + period:
        return _rank_step(job, world, gpu=gpu, known=known)
    # Two short stacks that differ by one period give the slope, which holds for any number of equal layers.
    few, more = (_rank_step(_with_layers(job, least + i * period), world, gpu=gpu, known=known) for i in range(2))
    times = (layers - least) // period
    return replace(
        few,
        weights=few.weights + times * (more.weights - few.weights),
        trained=few.trained + times * (more.trained - few.trained),
        moments=few.moments + times * (more.moments - few.moments),
        update=few.update + times * (more.update - few.update),
        encoder=few.encoder + (more.encoder - few.encoder) * times,
        encoder_peak=few.encoder_peak + times * (more.encoder_peak - few.encoder_peak),
        again=few.again + (more.again - few.again) * times,
        graph=few.graph + times * (more.graph - few.graph),
        contrast_peak=few.contrast_peak + times * (more.contrast_peak - few.contrast_peak),
        flops=rehearse(job, world).task.flops_per_step(),
    )


def _with_micro(job: Any, micro: int) -> Any:
    return job.model_copy(update={"batch": job.batch.model_copy(update={"micro": micro})})


def _with_layers(job: Any, layers: int) -> Any:
    return job.model_copy(update={"model": job.model.model_copy(update={"layers": layers})})


def _with_precision(job: Any, auto: str) -> Any:
    """The job with the precision that ``engine.precision=auto`` is on the device."""
    engine = job.engine
    return (
        job.model_copy(update={"engine": engine.model_copy(update={"precision": auto})})
        if (engine.precision == "auto")
        else job
    )


def contrast_of(job: Any) -> ContrastSection | None:
    """The section of the CAPT loss, where the job has one and its weight is above 0."""
    section = getattr(job, "contrast", None)
    return section if isinstance(section, ContrastSection) and section.weight > 0 else None


def _rank_step(job: Any, world: int, *, gpu: bool, known: Known) -> RankStep:
    parts = job.accumulation(world)
    section = contrast_of(job)
    cached = section is not None and section.is_cached(parts)
    # Two micro-batches show what every further one adds; the figures of the others are multiples of it.
    shown = min(parts, 2)
    if not cached or parts == shown:
        step, alone, rehearsal, marks = _with_contrast(job, world, shown, gpu=gpu, known=known)
        factor = parts / shown
        encoder, contrast = (Work.of(step) - Work.of(alone)) * factor, Work.of(alone) * factor
        sent, outside, queue = step.sent * round(factor), marks["peak outside the contrast"], step.queue
        during = marks.get("peak of the contrast", 0)
    else:
        # A cached contrast sees all micro-batches, so it is simulated whole and apart from the encoder.
        small = _without_queue(job)
        step, alone, rehearsal, marks = _with_contrast(small, world, shown, gpu=gpu, known=known)
        whole = _contrast_once(job, rehearse(job, world).task, world, gpu=gpu, known=known)
        encoder, contrast = (Work.of(step) - Work.of(alone)) * (parts / shown), Work.of(whole)
        counted = step.sent[: len(step.sent) - len(alone.sent)]
        sent, queue = (*counted, *whole.sent), whole.queue
        rows = (parts - shown) * 2 * job.micro_batch(world) * rehearsal.task.width * 4
        during = marks.get("when the contrast begins", 0) + (whole.peak - whole.before) + 2 * rows
        during += queue
        outside = marks["peak outside the contrast"] + 2 * rows + queue
    weights = marks["weights"] // 4
    whole_step = rehearse(job, world)
    task, sequences = whole_step.task, job.batch.global_
    flops = task.flops_per_step()
    tokens = task.tokens([whole_step.batch], sequences) if hasattr(task, "tokens") else 0
    return RankStep(
        weights, marks["trained"], marks["moments"], marks["update"],
        encoder, contrast, tuple(sent), outside, queue, flops, tokens, parts, cached, rehearsal.assumed,
        Work({}, 0, 0) if step.first is None else Work.of(step.first), marks.get("graph", 0), during,
        rehearsal.longest,
    )  # fmt: skip


def _planner(job: Job) -> Any:
    """The module ``plan`` of a task's package. Raises `UnplannedError` where it has none."""
    module = task_module(job.task.type, "plan")
    if module is None:
        raise UnplannedError(f"task.type {job.task.type}: its package has no module plan")
    return module


def completed(job: Job) -> Job:
    """The job with the sizes that something else than it decides, such as ``model.init``.

    Raises:
        ConfigError: the task cannot be planned, or the job is one that its start would refuse.
    """
    complete: Callable[[Job], Job] = getattr(_planner(job), "completed", lambda same: same)
    return complete(job)


def rehearse(job: Job, world: int) -> Rehearsal:
    """The task of a job without its data. Raises ``ConfigError`` where it cannot be planned."""
    with mock.patch("capt.pretrain.contrastive.task.check_precision"):  # this host may not have the device's types
        found: Rehearsal = _planner(job).rehearse(job, world)
    return found


def simulate_step(
    job: Job, world: int, rank: int = 0, *, parts: int | None = None, gpu: bool = True
) -> tuple[Simulated, dict[str, int], Rehearsal]:
    """A step of ``parts`` micro-batches but for the update; and bytes that lived when.

    Gradients stay where they are: averaging and updating them is the engine's, whose traffic and state are formulas.
    """
    parts = job.accumulation(world) if parts is None else parts
    with on_the_host():
        rehearsal = rehearse(job, world)
    task: Any = rehearsal.task
    batch = [rehearsal.batch] * parts
    with rank_of(world, rank, gpu=gpu), OpTracer() as tracer:
        with _weights_of_16_bits() if job.engine.casts_weights else nullcontext(), _unmoved():
            modules = task.build_modules()
        weights = sum(p.numel() for module in modules.values() for p in module.parameters())
        updated = _updated(modules, {name: each.section for name, each in task.optimizers().items()}, job.optimizer)
        term = getattr(task, "contrast", None)
        queued = task if term is None else term
        stored = fill_queue(queued, task.width) if getattr(queued, "queue", None) is not None else 0
        before, marks = tracer.live, {"weights": 4 * weights, "queue": stored, **updated}
        tracer.reset()
        with Wire() as wire, _marked(term, tracer, marks), _passes(task, tracer, marks) as passes:
            engines: dict[str, Any] = {
                name: _Gradients(name, module, job, parts)  # type: ignore[abstract]  # nothing else is asked for
                for name, module in modules.items()
            }
            task.step(engines, batch, Progress())
        outside = marks["peak outside the contrast"] = max(tracer.peak, marks.get("peak before the contrast", 0))
        peak = marks["peak of the step"] = max(outside, marks.get("peak of the contrast", 0))
        first = passes[0] if passes else None
        return replace(Simulated.of(wire, tracer, before, stored), peak=peak, first=first), marks, rehearsal


def _updated(
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
    with rank_of(world, rank, gpu=gpu), mock.patch("capt.pretrain.contrast.info_nce.check_precision"):
        return contrast_step(job, width, task=task)


def contrast_step(job: Any, width: int, parts: int | None = None, *, task: Any = None) -> Simulated:
    """The contrast of a step of this rank, simulated or real: forward, backward and push; the encoder is left out.

    The queue is full. The representations of the rank's samples are leaves, as in a cached step. Without
    ``contrast.cached`` the micro-batches are contrasted one after the other.
    """
    section, world = job.contrast, distributed.world_size()
    accumulation = job.accumulation(world) if parts is None else parts
    sizes = _contrasted(job, accumulation, world)
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
        return Simulated.of(wire, tracer, before, stored)


def _contrasted(job: Any, parts: int, world: int) -> list[int]:
    """The samples of a rank that are contrasted together, of a step of ``parts`` micro-batches."""
    n = job.micro_batch(world)
    return [n * parts] if job.contrast.is_cached(parts) else [n] * parts


def _contrast_once(job: Any, task: Any, world: int, *, gpu: bool, known: Known) -> Simulated:
    """`simulate_contrast` of the job of ``task``, unless ``known`` has it."""
    sizes = _contrasted(job, job.accumulation(world), world)
    others = job.model_copy(update={"model": None, "batch": None})
    key = repr((type(task), task.width, world, gpu, sizes, job.batch.global_, others))
    if key not in known:
        known[key] = simulate_contrast(job, task.width, world, gpu=gpu, task=task)
    return known[key]


def _with_contrast(
    job: Job, world: int, parts: int, *, gpu: bool, known: Known
) -> tuple[Simulated, Simulated, Rehearsal, dict[str, int]]:
    """A step of ``parts`` micro-batches, and the contrast of that step alone (nothing, without one)."""
    shorter = job.model_copy(update={"batch": job.batch.model_copy(update={
        "global_": parts * job.micro_batch(world) * world, "micro": job.micro_batch(world), "ramp": [],
    })})  # fmt: skip
    step, marks, rehearsal = simulate_step(shorter, world, gpu=gpu)
    if contrast_of(job) is None:
        alone = Simulated((), 0, 0, 0, 0, 0, 0)
    else:
        alone = _contrast_once(shorter, rehearsal.task, world, gpu=gpu, known=known)
    return step, alone, rehearsal, marks


def _without_queue(job: Any) -> Any:
    return job.model_copy(update={"contrast": job.contrast.model_copy(update={"queue": 0, "cached": True})})


def _quiet(job: Job) -> Any:
    """The job with no step that is logged, for its metrics are values, without a compiler, which needs some, and with
    no graph that is kept: what these change follows from `RankStep`."""
    update: dict[str, Any] = {
        "run": job.run.model_copy(update={"log_every": _NEVER}),
        "schedule": job.schedule.model_copy(update={"max_steps": _NEVER}),
    }
    if getattr(getattr(job, "model", None), "compile", False):
        update["model"] = job.model.model_copy(update={"compile": False})  # type: ignore[attr-defined]
    if (section := contrast_of(job)) is not None:
        update["contrast"] = section.model_copy(update={"keep": 0})
    return job.model_copy(update=update)


def fill_queue(term: Any, width: int) -> int:
    """Fill the ``queue`` of a term or task, and return the bytes of this rank's rows and ids."""
    if term.queue is None:
        return 0
    size = term.queue.shard_size
    term.queue.enqueue(F.normalize(torch.randn(size, width), dim=1), ids=torch.arange(size) + (1 << 40))
    return int(size * (width * term.queue.rows.element_size() + 8))


def plain_views(count: int, width: int) -> Views:
    """Both views of ``count`` samples, as leaves."""
    return Views(leaf_rows(count, width), leaf_rows(count, width), torch.arange(count), TEMPERATURE)


def leaf_rows(count: int, width: int) -> Tensor:
    """Unit rows that collect gradients."""
    return F.normalize(torch.randn(count, width), dim=1).requires_grad_()


@contextmanager
def _marked(term: ContrastTerm | None, tracer: OpTracer, marks: dict[str, int]) -> Iterator[None]:
    """Record the peak of bytes before the contrast of the step, and the peak while it is computed."""
    if term is None:
        yield
        return
    plain: Callable[..., Tensor] = term.loss

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        marks["peak before the contrast"] = max(tracer.peak, marks.get("peak before the contrast", 0))
        marks["when the contrast begins"] = tracer.live
        tracer.peak = tracer.live
        value = plain(*args, **kwargs)
        marks["peak of the contrast"] = max(tracer.peak, marks.get("peak of the contrast", 0))
        tracer.peak = tracer.live
        return value

    with mock.patch.object(term, "loss", loss):
        yield


@contextmanager
def _weights_of_16_bits() -> Iterator[None]:
    """What modules are made within has the size that the engine casts it to; a tensor without data cannot be cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _unmoved() -> Any:
    """Modules stay where they are, as peft moves its adapters; parameters that are watched cannot be swapped."""
    return mock.patch.object(nn.Module, "to", lambda module, *_, **__: module)


@contextmanager
def _passes(task: Any, tracer: OpTracer, marks: dict[str, int]) -> Iterator[list[Simulated]]:
    """Write down the bytes of a micro-batch's graph, and give what each pass without a graph does."""
    found: list[Simulated] = []
    if not isinstance(task, ContrastTask):
        yield found
        return
    represent, losses = task.represent, task.losses

    def measured_pass(*args: Any) -> Any:
        before, flops = Simulated.of(Wire(), tracer, 0, 0), Counter(tracer.flops_of)
        views = represent(*args)
        found.append(replace(
            before, flops_of=tracer.flops_of - flops, moved=tracer.moved - before.moved,
            operators=tracer.operators - before.operators,
        ))  # fmt: skip
        return views

    def measured_losses(*args: Any) -> Any:
        before = tracer.live
        values = losses(*args)
        marks.setdefault("graph", tracer.live - before)
        return values

    with mock.patch.multiple(task, represent=measured_pass, losses=measured_losses):
        yield found


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


def parts_of(sent: Sequence[Sent]) -> list[tuple[str, int]]:
    """Name and bytes of collectives, as `capt.pretrain.plan.predict` takes them."""
    return [(each.name, each.received) for each in sent]
