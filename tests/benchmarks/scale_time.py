"""A model of a step's time on H100 GPUs, from what is simulated and from published constants.

Nothing here was measured on a GPU. Every constant names its source; what has none is called an assumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.scale_step import Simulated

DATASHEET = "NVIDIA H100 datasheet, SXM, dense"
TUNING = "NCCL, `src/graph/tuning.cc`, commit 01afd20"


@dataclass(frozen=True)
class Constant:
    """A number of the model, in SI units, with where it comes from."""

    value: float
    unit: str
    source: str


CONSTANTS = {
    "bf16 products, peak": Constant(989.4e12, "FLOP/s", DATASHEET),
    "tf32 products, peak": Constant(494.7e12, "FLOP/s", DATASHEET),
    "fp32 products, peak": Constant(66.9e12, "FLOP/s", DATASHEET),
    "memory, peak": Constant(3.35e12, "B/s", DATASHEET),
    "NVLink, one direction": Constant(450e9, "B/s", "the same: 900 GB/s in both"),
    "a network card of 400 Gb/s, measured": Constant(46e9, "B/s", "NVIDIA in nccl-tests#290: 46 to 48 GB/s"),
    "GPUs and cards of a host": Constant(8, "", "DGX H100"),
    "start of a ring, Simple; LL": Constant(8.4e-6, "s", f"{TUNING}; LL 3.6e-6"),
    "step of a ring, NVLink, Simple; LL": Constant(3.4e-6, "s", f"{TUNING}; LL 0.47e-6, times 1.8 between hosts"),
    "step of a ring, network, Simple; LL": Constant(9.6e-6, "s", f"{TUNING}; LL 2.7e-6"),
    "bandwidth of LL over that of Simple": Constant(0.25, "", f"{TUNING}; 1/3 within a host, but in all-reduces"),
}

_PEAK = {"fp32": 66.9e12, "tf32": 494.7e12, "bf16x6": 989.4e12, "bf16x3": 989.4e12, "bf16": 989.4e12}
_LOW_LATENCY = {"start": 3.6e-6, "nvlink": 0.47e-6, "between hosts": 1.8, "network": 2.7e-6}


@dataclass(frozen=True)
class Assumptions:
    """What no published number says. The defaults are the central case.

    Attributes:
        encoder: share of the bf16 peak that the encoder's products reach, recomputed ones counted.
        products: share of the peak that the contrast's products reach.
        memory: share of the memory's peak that the operators between the products reach.
        launch: seconds that the host needs to start an operator; hosts run ahead, so the larger of this and of the
            device's time counts.
        links: share of NVLink's peak that a ring reaches.
        rails: whether a ring between hosts uses all network cards of a host; else one card a ring.
        zero_hidden: share of ZeRO's traffic that is hidden behind the backward pass.
    """

    encoder: float = 0.40
    products: float = 0.70
    memory: float = 0.70
    launch: float = 6e-6
    links: float = 0.80
    rails: bool = True
    zero_hidden: float = 0.0


CENTRAL = Assumptions()
DEAR = replace(CENTRAL, encoder=0.45, products=0.5, memory=0.5, launch=10e-6, rails=False, zero_hidden=1.0)
"""Each assumption set so that the contrast takes a larger share of the step."""
CHEAP = replace(CENTRAL, encoder=0.30, products=0.8, memory=0.8, launch=4e-6, links=0.9)
"""Each so that it takes a smaller one."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step's parts on one rank."""

    encoder: float
    zero: float
    update: float
    device: float
    launches: float
    wire: float

    @property
    def contrast(self) -> float:
        """Arithmetic, or the starts of its operators where these take longer; and its collectives."""
        return max(self.device, self.launches) + self.wire

    @property
    def total(self) -> float:
        """Of the step: nothing but ZeRO's traffic overlaps."""
        return self.encoder + self.zero + self.update + self.contrast

    @property
    def share(self) -> float:
        """Of the contrast in the step."""
        return self.contrast / self.total


def collective_seconds(name: str, received: int, world: int, given: Assumptions) -> float:
    """A collective's time by NCCL's own model of a ring, the faster of its protocols Simple and LL.

    ``start + steps on NVLink + steps on the network + bytes received / bandwidth``, with twice the steps and bytes in
    an all-reduce.
    """
    if world == 1 or received == 0:
        return 0.0
    hosts = max(1, world // 8)
    twice = 2 if name == "allreduce_" else 1
    network, local, received = twice * (hosts - 1), twice * (world - hosts), twice * received
    bandwidth = given.links * 450e9
    if hosts > 1:
        bandwidth = min(bandwidth, (8 if given.rails else 1) * 46e9)
    low = _LOW_LATENCY
    simple = 8.4e-6 + local * 3.4e-6 + network * 9.6e-6 + received / bandwidth
    between = low["between hosts"] if hosts > 1 else 1.0
    ll = low["start"] + local * between * low["nvlink"] + network * low["network"]
    ll += received / (bandwidth / (3 if hosts == twice == 1 else 4))
    return min(simple, ll)


def traffic_seconds(sent: Sequence[tuple[str, int]], world: int, given: Assumptions) -> float:
    """Collectives one after the other."""
    return sum(collective_seconds(name, received, world, given) for name, received in sent)


def step_time(
    contrast: Simulated,
    encoder_flops: float,
    zero: Sequence[tuple[str, int]],
    update_bytes: int,
    world: int,
    precision: str,
    given: Assumptions = CENTRAL,
) -> StepTime:
    """The parts of a step on one rank.

    Args:
        contrast: its simulation.
        encoder_flops: everything but the contrast on this rank, recomputed layers and first passes counted.
        zero: collectives of gradients and weights.
        update_bytes: that the optimizer reads and writes.
        world: ranks.
        precision: of the contrast's products.
        given: the assumptions.
    """
    memory = given.memory * 3.35e12
    return StepTime(
        encoder=encoder_flops / (given.encoder * 989.4e12),
        zero=(1 - given.zero_hidden) * traffic_seconds(zero, world, given),
        update=update_bytes / memory,
        device=contrast.flops / (given.products * _PEAK[precision]) + contrast.moved / memory,
        launches=given.launch * contrast.operators,
        wire=traffic_seconds([(each.name, each.received) for each in contrast.sent], world, given),
    )
