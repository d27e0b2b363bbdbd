r"""Closed forms of what a rank receives: the contrast's (``docs/contrast.md``), and ZeRO's, which is not simulated."""

from __future__ import annotations

import functools
from typing import Literal

from capt.pretrain.engine.engines.deepspeed_config import BUCKET
from capt.pretrain.language.config import LanguageJob

Stage = Literal[0, 1, 2, 3]


def contrast_received(job: LanguageJob, world: int, width: int) -> list[tuple[str, int]]:
    """The contrast's collectives of a step and the bytes that a rank receives in each, as docs/contrast.md has them.

    For rows of which all ranks have as many, a temperature that is a number, at most 64 of its inverse and the hardness
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


def zero_received(
    weights: int, stage: Stage, world: int, parts: int, cached: bool, bucket: int = BUCKET
) -> list[tuple[str, int]]:
    """A formula: what ZeRO makes a rank receive in a step of ``parts`` micro-batches, in fp32.

    Stages 1 and 2 all-reduce gradients, for DeepSpeed's buckets hold those of several owners, in about as many messages
    as there are buckets; stage 3 reduce-scatters them. Stages 0 and 1 reduce once a step, stages 2 and 3 in every
    micro-batch, for they keep no whole gradient. Stages 1 and 2 then gather the weights; stage 3 does for each forward
    and each backward pass, and for the first pass of a cached contrast; recomputed layers are counted with their
    backward pass. Of an all-reduce the size of the whole stands here, as in `tests.wire`; a ring receives it twice.
    """
    gather = ("_allgather_base_", 4 * weights * (world - 1) // world)
    if stage == 3:
        return [("_reduce_scatter_base_", gather[1])] * parts + [gather] * (parts * (3 if cached else 2))
    if stage == 0:
        return [("allreduce_", 4 * weights)]
    sizes = [bucket] * (weights // bucket) + [weights % bucket] * (weights % bucket > 0)
    return [("allreduce_", 4 * size) for size in sizes] * (parts if stage == 2 else 1) + [gather]


def state_bytes(weights: int, stage: Stage, world: int) -> int:
    """A formula: weights, gradients and both moments of Adam of a rank, all in fp32.

    Stages 1 and 2 update a copy of the weights that a rank owns (DeepSpeed's ``single_partition_of_fp32_groups``).
    """
    whole, spread = {0: (4, 0), 1: (2, 3), 2: (1, 4), 3: (0, 4)}[stage]
    return 4 * weights * whole + 4 * weights * spread // world
