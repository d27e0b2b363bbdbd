"""A whole training step of one rank of a job: what it sends, holds and computes, from a few rehearsed parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.traits import using
from capt.pretrain.config.contrast import ContrastSection
from capt.pretrain.config.schema import Job
from capt.pretrain.plan.rehearsal import (
    Simulated,
    completed,
    contrast_sizes,
    rehearse,
    simulate_contrast,
    simulate_step,
)
from capt.pretrain.plan.simulated import OnTheHost, Sent, Work

LAYERS = 2
"""Layers of the shorter of the two stacks from which a deeper one is extrapolated."""
_NEVER = 2**31 - 1


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


_contrasts: dict[str, Simulated] = {}
"""Contrasts that have been simulated, which are the same whatever the encoder is, and however a rank cuts its part."""


@using(OnTheHost())
def rank_step(job: Job, world: int, *, gpu: bool) -> RankStep:
    """Simulate rank 0 of ``world`` in a step of ``job``.

    Two micro-batches are simulated, which the others repeat. A cached contrast, which is one over all of them, is
    simulated by itself where there are more, and once in a process. Of a stack of equal layers (``model.layers``) the
    first few are simulated: work, weights and memory are affine in their number, or in that of their periods where
    kinds alternate. Those that ``optimizer.freeze`` names are among them.

    Where a rank has fewer rows than ``batch.micro``, or parts that differ by one, all are as large as the largest.

    Raises:
        ConfigError: the batch sizes do not fit ``world``, or the task cannot be planned.
    """
    job = completed(job)
    try:
        parts = job.accumulation(world)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    job = _without_extras(job)
    if job.engine.precision == "auto":
        job = _with(job, "engine", precision="bf16" if gpu else "fp32")
    job = _with(job, "batch", micro=-(-job.batch.global_ // (parts * world)))
    model = getattr(job, "model", None)
    layers, period = getattr(model, "layers", 0), getattr(model, "period", 1)
    frozen = job.optimizer.freeze if isinstance(job.optimizer.freeze, int) else 0
    # Whole periods are left out, so that the short stack ends in the same kind of layer; the frozen ones stay in it.
    least = LAYERS + frozen + (layers - LAYERS - frozen) % period
    if layers <= least + period:
        return _simulated_step(job, world, gpu=gpu)
    # Two short stacks that differ by one period give the slope, which holds for any number of equal layers.
    few, more = (_simulated_step(_with(job, "model", layers=least + i * period), world, gpu=gpu) for i in range(2))
    times = (layers - least) // period
    ends = {name: getattr(few, name) + (getattr(more, name) - getattr(few, name)) * times for name in _AFFINE}
    # A formula of the task, for the whole stack.
    return replace(few, **ends, flops=rehearse(job, world).task.flops_per_step())


_AFFINE = ("weights", "trained", "moments", "update", "encoder", "encoder_peak", "again", "graph", "contrast_peak")
"""Attributes of a step that are affine in the number of layers; the others do not depend on it, or are formulas."""


def _with(job: Any, section: str, **keys: Any) -> Any:
    """Return the job with other values of ``keys`` in a section."""
    return job.model_copy(update={section: getattr(job, section).model_copy(update=keys)})


def contrast_of(job: Any) -> ContrastSection | None:
    """The section of the CAPT loss, where the job has one and its weight is above 0."""
    section = getattr(job, "contrast", None)
    return section if isinstance(section, ContrastSection) and section.weight > 0 else None


def _simulated_step(job: Any, world: int, *, gpu: bool) -> RankStep:
    """Return the step of `rank_step` for all layers of ``job``."""
    parts, rehearsal = job.accumulation(world), rehearse(job, world)
    section, task = contrast_of(job), rehearsal.task
    cached = section is not None and section.is_cached(parts)
    # Two micro-batches show what every further one adds; the figures of the others are multiples of it.
    shown, n = min(parts, 2), job.micro_batch(world)
    # A cached contrast sees all micro-batches, so it is simulated whole and apart from the encoder.
    apart = cached and parts > shown
    small = _with(job, "batch", global_=shown * n * world, micro=n, ramp=[])
    if apart:
        small = _with(small, "contrast", queue=0, cached=True)
    step, marks, of_small = simulate_step(small, world, gpu=gpu)
    alone = Simulated() if section is None else _contrast_once(small, of_small.task, world, gpu=gpu)
    factor, outside = parts / shown, marks["peak outside the contrast"]
    contrast, sent, queue, during = (
        alone * factor,
        step.sent * round(factor),
        step.queue,
        marks.get("peak of the contrast", 0),
    )
    if apart:
        contrast = whole = _contrast_once(job, task, world, gpu=gpu)
        # The collectives of the small contrast give way to those of the whole one.
        sent, queue = (*step.sent[: len(step.sent) - len(alone.sent)], *whole.sent), whole.queue
        # Both views, in fp32, of the micro-batches that were not simulated. Twice: the contrast sees the leaves of all
        # micro-batches and their join, the second passes see the leaves and their gradients.
        rows = 2 * (parts - shown) * 2 * n * task.width * 4
        outside += rows + queue
        during = marks.get("when the contrast begins", 0) + (whole.peak - whole.before) + rows + queue
    return RankStep(
        weights=marks["weights"] // 4,  # marked as bytes of fp32
        trained=marks["trained"],
        moments=marks["moments"],
        update=marks["update"],
        encoder=(step - alone) * factor,
        contrast=contrast,
        sent=sent,
        encoder_peak=outside,
        queue=queue,
        flops=task.flops_per_step(),
        tokens=task.tokens([rehearsal.batch], job.batch.global_) if hasattr(task, "tokens") else 0,
        parts=parts,
        cached=cached,
        assumed=rehearsal.assumed,
        again=step.first,
        graph=marks.get("graph", 0),
        contrast_peak=during,
        longest=rehearsal.longest,
    )


def _contrast_once(job: Any, task: Any, world: int, *, gpu: bool) -> Simulated:
    """Simulate the contrast of the job of ``task``, unless one of these sizes has been simulated."""
    # The encoder and the cut of the batch do not change a contrast of these sizes.
    others = job.model_copy(update={"model": None, "batch": None})
    key = repr((type(task), task.width, world, gpu, contrast_sizes(job, world), job.batch.global_, others))
    if key not in _contrasts:
        _contrasts[key] = simulate_contrast(job, task.width, world, gpu=gpu, task=task)
    return _contrasts[key]


def _without_extras(job: Any) -> Any:
    """Return the job without logged steps, whose metrics are values, a compiler, which needs some, and kept graphs.

    What these change follows from `RankStep`.
    """
    job = _with(_with(job, "run", log_every=_NEVER), "schedule", max_steps=_NEVER)
    if getattr(getattr(job, "model", None), "compile", False):
        job = _with(job, "model", compile=False)
    return job if contrast_of(job) is None else _with(job, "contrast", keep=0)


def parts_of(sent: Sequence[Sent]) -> list[tuple[str, int]]:
    """Name and bytes of collectives, as `capt.pretrain.plan.predict` takes them."""
    return [(each.name, each.received) for each in sent]
