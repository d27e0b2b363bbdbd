"""Closed forms of what a rank receives of the contrast (``docs/contrast.md``)."""

from __future__ import annotations

import functools

from capt.pretrain.language.config import LanguageJob


def contrast_received(job: LanguageJob, world: int, width: int) -> list[tuple[str, int]]:
    """The contrast's collectives of a step and the bytes that a rank receives in each, as docs/contrast.md has them.

    For equal numbers of rows on all ranks, a temperature that is a number, at most 64 of its inverse and the hardness
    together, no ``contrast.momentum``, no diagnostics.
    """
    section = job.contrast
    parts = 1 if section.is_cached(job.accumulation(world)) else job.accumulation(world)
    m = 2 * job.batch.global_ // world // parts  # anchors of this rank: both views
    if world == 1:
        return []
    term = functools.partial(_softmax_received, job, world, width, m)
    queue = section.queue > 0 and section.queue_share != 0
    if section.queue_weight is None:
        forms = term(queue=queue, in_batch=section.in_batch)
    else:
        forms = term(queue=False, in_batch=section.in_batch) + term(queue=queue, in_batch="none")
    if section.queue and section.drift != "none":
        forms += [_statistics(width)]  # at the push
    return forms * parts


def _statistics(width: int) -> tuple[str, int]:
    return "allreduce_", (2 * width + 1) * 8


def _softmax_received(
    job: LanguageJob, world: int, width: int, m: int, *, queue: bool, in_batch: str
) -> list[tuple[str, int]]:
    """The collectives of one softmax: of the loss, or of one of its two terms with ``contrast.queue_weight``."""
    section, others = job.contrast, world - 1
    if in_batch != "global" and not queue:
        return []
    forms = []
    if queue and section.drift != "none":
        forms += [_statistics(width)]
    if queue and section.queue_share is not None:
        forms += [("allreduce_", 8)]
    forms += [("_allgather_base_", others * m * width * (2 if section.precision == "bf16" else 4))]
    if section.mask_duplicates:
        forms += [("_allgather_base_", others * m * 8)]
    if queue and section.hardness:
        forms += [("allreduce_", 2 * world * m * 4)]
    forms += [("_reduce_scatter_base_", others * m * (width + 1) * 4)]
    if in_batch != "none":
        forms += [("_allgather_base_", others * m * 4)]
    return forms
