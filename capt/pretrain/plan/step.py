"""A whole training step of one rank of a job: what it sends, holds and computes, from a few rehearsed parts of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.traits import using
from capt.pretrain.config.contrast import ContrastSection
from capt.pretrain.config.schema import Job
from capt.pretrain.plan.rehearsal import (
    Rehearsal,
    Simulated,
    completed,
    contrasted,
    rehearse,
    simulate_contrast,
    simulate_step,
)
from capt.pretrain.plan.simulated import OnTheHost, Sent

LAYERS = 2
"""Layers of the shorter of the two stacks from which a deeper one is extrapolated."""
_NEVER = 2**31 - 1


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


@using(OnTheHost())
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
    # Whole periods are left out, so that the short stack ends in the same kind of layer; the frozen ones stay in it.
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
        # A formula of the task, for the whole stack.
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
        # The collectives of the small contrast give way to those of the whole one.
        counted = step.sent[: len(step.sent) - len(alone.sent)]
        sent, queue = (*counted, *whole.sent), whole.queue
        # Both views, in fp32, of the micro-batches that were not simulated.
        rows = (parts - shown) * 2 * job.micro_batch(world) * rehearsal.task.width * 4
        # Twice: the contrast sees the leaves of all micro-batches and their join, the second passes see the leaves and
        # their gradients.
        during = marks.get("when the contrast begins", 0) + (whole.peak - whole.before) + 2 * rows
        during += queue
        outside = marks["peak outside the contrast"] + 2 * rows + queue
    # Marked as bytes of fp32.
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


def _contrast_once(job: Any, task: Any, world: int, *, gpu: bool, known: Known) -> Simulated:
    """`simulate_contrast` of the job of ``task``, unless ``known`` has it."""
    sizes = contrasted(job, job.accumulation(world), world)
    # The encoder and the cut of the batch do not change a contrast of these sizes.
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


def parts_of(sent: Sequence[Sent]) -> list[tuple[str, int]]:
    """Name and bytes of collectives, as `capt.pretrain.plan.predict` takes them."""
    return [(each.name, each.received) for each in sent]
