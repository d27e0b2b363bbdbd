"""The share of the contrast in a step on H100 GPUs, by the rates and assumptions of ``capt plan``.

Nothing here was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from capt.pretrain.plan.devices import (
    CARD,
    CENTRAL,
    DEVICES,
    FAST,
    GPUS_OF_HOST,
    LL_BETWEEN_HOSTS,
    LL_SLOWER,
    NETWORK_STEP,
    NVLINK_STEP,
    SLOW,
    START,
    Assumptions,
    Constant,
)
from capt.pretrain.plan.predict import traffic_seconds
from capt.pretrain.plan.rehearsal import Simulated
from capt.pretrain.plan.simulated import Work

H100 = DEVICES["h100"]

CONSTANTS = {
    **{f"{name} products, peak": Constant(H100.peak(name), "FLOP/s", H100.source) for name in ("bf16", "tf32", "fp32")},
    "memory, peak": Constant(H100.bandwidth, "B/s", H100.source),
    "NVLink, one direction": Constant(H100.link, "B/s", H100.source),
    "one network card, measured": CARD,
    "GPUs, and network cards, of a host": GPUS_OF_HOST,
    **{f"start of a ring, {name}": each for name, each in START.items()},
    **{f"step of a ring on NVLink, {name}": each for name, each in NVLINK_STEP.items()},
    **{f"step of a ring between hosts, {name}": each for name, each in NETWORK_STEP.items()},
    "NVLink step of LL with several hosts, times": LL_BETWEEN_HOSTS,
    "bandwidth of Simple / of LL, one host": LL_SLOWER[True],
    "bandwidth of Simple / of LL, several hosts or all-reduce": LL_SLOWER[False],
}


class Given(NamedTuple):
    """The assumptions for the encoder and ZeRO, and those for the contrast."""

    encoder: Assumptions
    contrast: Assumptions


MIDDLE = Given(CENTRAL, CENTRAL)
DEAR = Given(FAST, SLOW)
"""Each assumption set so that the contrast takes a larger share of the step."""
CHEAP = Given(SLOW, FAST)
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
        """Seconds of the step: nothing but ZeRO's traffic overlaps."""
        return self.encoder + self.zero + self.update + self.contrast

    @property
    def share(self) -> float:
        """The share of the contrast in the step."""
        return self.contrast / self.total


def step_time(
    contrast: Simulated,
    encoder: Work,
    zero: Sequence[tuple[str, int]],
    update_bytes: int,
    world: int,
    precision: str,
    given: Given = MIDDLE,
) -> StepTime:
    """The parts of a step on one rank.

    Args:
        contrast: its simulation.
        encoder: everything but the contrast on this rank, recomputed layers and first passes counted.
        zero: collectives of gradients and weights.
        update_bytes: that the optimizer reads and writes.
        world: ranks.
        precision: of the contrast's products.
        given: the assumptions.
    """
    of, own = given
    products = encoder.flops / (of.products * H100.bf16)
    passes = max(products + encoder.moved / (of.memory * H100.bandwidth), of.launch * encoder.operators)
    reductions = [each for each in zero if each[0] != "_allgather_base_"]
    gathers = [each for each in zero if each[0] == "_allgather_base_"]
    return StepTime(
        encoder=passes,
        zero=(1 - of.zero_hidden) * traffic_seconds(reductions, world, of, H100)
        + traffic_seconds(gathers, world, of, H100),
        update=update_bytes / (of.memory * H100.bandwidth),
        device=contrast.flops / (own.products * H100.peak(precision)) + contrast.moved / (own.memory * H100.bandwidth),
        launches=own.launch * contrast.operators,
        wire=traffic_seconds([(each.name, each.received) for each in contrast.sent], world, own, H100),
    )
