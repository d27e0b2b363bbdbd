"""A model of a step's time on H100 GPUs, from what is simulated and from published constants.

Nothing here was measured on a GPU. Every constant names its source; what has none is called an assumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.scale_step import Simulated

PAPER = "NVIDIA, H100 Tensor Core GPU Architecture (white paper), SXM5, dense; the datasheet rounds it"
TUNING = "NCCL, `src/graph/tuning.cc`, commit 01afd20"


@dataclass(frozen=True)
class Constant:
    """A number of the model, in SI units, with where it comes from."""

    value: float
    unit: str
    source: str


PEAKS = {
    "bf16": Constant(989.4e12, "FLOP/s", PAPER),
    "tf32": Constant(494.7e12, "FLOP/s", PAPER),
    "fp32": Constant(66.9e12, "FLOP/s", PAPER),
}
MEMORY = Constant(3.35e12, "B/s", "NVIDIA, H100 datasheet, SXM")
NVLINK = Constant(450e9, "B/s", "the same: 900 GB/s, both directions together")
CARD = Constant(45.7e9, "B/s", "nccl-tests#309: 366 GB/s on 4 hosts with 8 cards of 400 Gb/s each")
GPUS = Constant(8, "", "DGX H100, datasheet: 8 GPUs and 8 cards of 400 Gb/s a host")
START = {"Simple": Constant(8.4e-6, "s", TUNING), "LL": Constant(3.6e-6, "s", TUNING)}
NVLINK_STEP = {"Simple": Constant(3.4e-6, "s", TUNING), "LL": Constant(0.47e-6, "s", TUNING)}
NETWORK_STEP = {"Simple": Constant(9.6e-6, "s", TUNING), "LL": Constant(2.7e-6, "s", TUNING)}
LL_BETWEEN_HOSTS = Constant(1.8, "", f"{TUNING}: a step of LL on NVLink in a ring of several hosts")
LL_SLOWER = {True: Constant(3, "", TUNING), False: Constant(4, "", TUNING)}

CONSTANTS = {
    **{f"{name} products, peak": peak for name, peak in PEAKS.items()},
    "memory, peak": MEMORY,
    "NVLink, one direction": NVLINK,
    "one network card, measured": CARD,
    "GPUs, and network cards, of a host": GPUS,
    **{f"start of a ring, {name}": each for name, each in START.items()},
    **{f"step of a ring on NVLink, {name}": each for name, each in NVLINK_STEP.items()},
    **{f"step of a ring between hosts, {name}": each for name, each in NETWORK_STEP.items()},
    "NVLink step of LL with several hosts, times": LL_BETWEEN_HOSTS,
    "bandwidth of Simple / of LL, one host": LL_SLOWER[True],
    "bandwidth of Simple / of LL, several hosts or all-reduce": LL_SLOWER[False],
}


def _peak(precision: str) -> float:
    return PEAKS["bf16" if precision.startswith("bf16") else precision].value


@dataclass(frozen=True)
class Assumptions:
    """What no published number says (:data:`ABOUT`). The defaults are the central case."""

    encoder: float = 0.40
    products: float = 0.70
    memory: float = 0.70
    launch: float = 6e-6
    links: float = 0.80
    rails: bool = True
    zero_hidden: float = 0.0


ABOUT = {
    "encoder": "share of the bf16 peak that the encoder's products reach, recomputed ones counted",
    "products": "share of the peak that the contrast's products reach",
    "memory": "share of the memory's peak that the operators between the products, and the update, reach",
    "launch": "seconds in which the host starts an operator of the contrast; hosts run ahead, so the larger of this "
    "and of the device's time counts",
    "links": "share of NVLink's peak that a ring reaches",
    "rails": "whether a ring between hosts uses all network cards of a host; else one card",
    "zero_hidden": "share of ZeRO's traffic that is hidden behind the backward pass",
}
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
    hosts = max(1, world // int(GPUS.value))
    twice = 2 if name == "allreduce_" else 1
    network, local, received = twice * (hosts - 1), twice * (world - hosts), twice * received
    bandwidth = given.links * NVLINK.value
    if hosts > 1:
        bandwidth = min(bandwidth, (GPUS.value if given.rails else 1) * CARD.value)
    simple = START["Simple"].value + local * NVLINK_STEP["Simple"].value + network * NETWORK_STEP["Simple"].value
    between = LL_BETWEEN_HOSTS.value if hosts > 1 else 1.0
    ll = START["LL"].value + local * between * NVLINK_STEP["LL"].value + network * NETWORK_STEP["LL"].value
    slower = LL_SLOWER[hosts == twice == 1].value
    return min(simple + received / bandwidth, ll + slower * received / bandwidth)


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
    memory = given.memory * MEMORY.value
    return StepTime(
        encoder=encoder_flops / (given.encoder * PEAKS["bf16"].value),
        zero=(1 - given.zero_hidden) * traffic_seconds(zero, world, given),
        update=update_bytes / memory,
        device=contrast.flops / (given.products * _peak(precision)) + contrast.moved / memory,
        launches=given.launch * contrast.operators,
        wire=traffic_seconds([(each.name, each.received) for each in contrast.sent], world, given),
    )
