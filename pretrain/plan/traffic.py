"""What ZeRO makes a rank receive and hold (formulas), and the time of collectives by NCCL's own model of a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from capt.pretrain.engine.engines.deepspeed_config import BUCKET
from capt.pretrain.plan.devices import (
    GPUS_OF_HOST,
    LL_BETWEEN_HOSTS,
    LL_SLOWER,
    NETWORK_STEP,
    NVLINK_STEP,
    START,
    Assumptions,
    Device,
    hosts,
)

Stage = Literal[0, 1, 2, 3]


def zero_received(
    weights: int,
    stage: Stage,
    world: int,
    parts: int,
    cached: bool,
    bucket: int = BUCKET,
    *,
    trained: int | None = None,
    reduced: int = 4,
    gathered: int = 4,
) -> list[tuple[str, int]]:
    """What ZeRO makes a rank receive in a step of ``parts`` micro-batches.

    Stages 1 and 2 all-reduce gradients, for DeepSpeed's buckets hold those of several owners, about one message a
    bucket; stage 3 reduce-scatters them. Stages 0 and 1 reduce once a step, stages 2 and 3 in every
    micro-batch, for they keep no whole gradient. Stages 1 and 2 then gather the weights; stage 3 does for each forward
    and each backward pass, and for the first pass of a cached contrast; recomputed layers are counted with their
    backward pass. An all-reduce is given by the size of the whole, which a ring receives twice. ``reduced`` and
    ``gathered`` are the bytes of an element of the gradients and of the weights on the wire. Where only ``trained`` of
    the weights are, the others have no gradients, and stage 3 alone gathers them.
    """
    if world == 1:
        return []
    trained = weights if trained is None else trained
    gather = ("_allgather_base_", gathered * (weights if stage == 3 else trained) * (world - 1) // world)
    if stage == 3:
        return [("_reduce_scatter_base_", reduced * trained * (world - 1) // world)] * parts + [gather] * (
            parts * (3 if cached else 2)
        )
    if stage == 0:
        return [("allreduce_", reduced * trained)]
    sizes = [bucket] * (trained // bucket) + [trained % bucket] * (trained % bucket > 0)
    return [("allreduce_", reduced * size) for size in sizes] * (parts if stage == 2 else 1) + [gather]


def collective_seconds(name: str, received: int, world: int, given: Assumptions, device: Device) -> float:
    """A collective's time by NCCL's own model of a ring, the faster of its protocols Simple and LL.

    ``start + steps on NVLink + steps on the network + bytes received / bandwidth``, with twice the steps and bytes in
    an all-reduce. The latencies are those of Hopper.
    """
    if world == 1 or received == 0:
        return 0.0
    several = hosts(world, device)
    twice = 2 if name == "allreduce_" else 1
    network, local, received = twice * (several - 1), twice * (world - several), twice * received
    bandwidth = given.links * device.link
    if several > 1:
        bandwidth = min(bandwidth, (GPUS_OF_HOST.value if given.rails else 1) * device.card)
    simple = START["Simple"].value + local * NVLINK_STEP["Simple"].value + network * NETWORK_STEP["Simple"].value
    between = LL_BETWEEN_HOSTS.value if several > 1 else 1.0
    ll = START["LL"].value + local * between * NVLINK_STEP["LL"].value + network * NETWORK_STEP["LL"].value
    slower = LL_SLOWER[several == twice == 1].value
    return min(simple + received / bandwidth, ll + slower * received / bandwidth)


def traffic_seconds(sent: Sequence[tuple[str, int]], world: int, given: Assumptions, device: Device) -> float:
    """Time of collectives one after the other."""
    return sum((collective_seconds(name, received, world, given, device) for name, received in sent), 0.0)
