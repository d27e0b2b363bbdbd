"""Devices and clusters that a job can be planned for: peaks, memory, links, each with where the number comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Literal

from capt.pretrain.base.errors import ConfigError, did_you_mean
from capt.pretrain.engine.provenance import gpu_kind

TUNING = "NCCL, `src/graph/tuning.cc`, commit 01afd20"
GIB = 2**30


@dataclass(frozen=True)
class Constant:
    """A published number in SI units, with where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Device:
    """Published figures of a device.

    Attributes:
        name: as ``--gpus`` has it.
        bf16: peak of dense products, FLOP/s.
        tf32: the same.
        fp32: the same.
        bandwidth: of its memory, B/s.
        memory: bytes, as torch reports them.
        link: between the devices of a host, one direction, B/s.
        card: of a network card between hosts, B/s; a host has one for each device.
        source: of these numbers.
    """

    name: str
    bf16: float
    tf32: float
    fp32: float
    bandwidth: float
    memory: float
    link: float
    card: float
    source: str

    @property
    def is_gpu(self) -> bool:
        """Return true for a GPU, and false for a processor of a host."""
        return self.name != "cpu"

    def peak(self, precision: str) -> float:
        """Peak of dense products in ``bf16``, ``fp16``, ``tf32`` or ``fp32``; splits into bf16 count as bf16."""
        return {"tf32": self.tf32, "fp32": self.fp32}.get(precision, self.bf16)


CARD = Constant(45.7e9, "B/s", "nccl-tests#309: 366 GB/s on 4 hosts with 8 cards of 400 Gb/s each")
GPUS_OF_HOST = Constant(8.0, "", "DGX A100, H100, H200, B200, data sheets: 8 GPUs and 8 network cards a host")
START = {"Simple": Constant(8.4e-6, "s", TUNING), "LL": Constant(3.6e-6, "s", TUNING)}
NVLINK_STEP = {"Simple": Constant(3.4e-6, "s", TUNING), "LL": Constant(0.47e-6, "s", TUNING)}
NETWORK_STEP = {"Simple": Constant(9.6e-6, "s", TUNING), "LL": Constant(2.7e-6, "s", TUNING)}
LL_BETWEEN_HOSTS = Constant(1.8, "", f"{TUNING}: a step of LL on NVLink in a ring of several hosts")
LL_SLOWER = {True: Constant(3.0, "", TUNING), False: Constant(4.0, "", TUNING)}
"""Bandwidth of the protocol Simple divided by that of LL: on one host without an all-reduce (True), and otherwise."""

DEVICES = {
    "a100": Device(
        "a100", 312e12, 156e12, 19.5e12, 2.039e12, 79.15 * GIB, 300e9, CARD.value / 2,
        "NVIDIA A100 80GB SXM data sheet; cards of 200 Gb/s (DGX A100)",
    ),
    "h100": Device(
        "h100", 989.4e12, 494.7e12, 66.9e12, 3.35e12, 79.1 * GIB, 450e9, CARD.value,
        "NVIDIA H100 white paper, SXM5, dense; memory and links: data sheet",
    ),
    "h200": Device(
        "h200", 989.4e12, 494.7e12, 66.9e12, 4.8e12, 139.8 * GIB, 450e9, CARD.value, "NVIDIA H200 data sheet, SXM",
    ),
    "b200": Device(
        "b200", 2250e12, 1125e12, 75e12, 7.7e12, 178.3 * GIB, 900e9, CARD.value,
        "NVIDIA HGX B200 data sheet, dense, an eighth of the board",
    ),
    # A guess of one thread with 8-wide fused multiply-adds at 3 GHz.
    "cpu": Device("cpu", 96e9, 96e9, 96e9, 12e9, 0.0, 10e9, 1e9, "an assumption: one thread of a recent x86 processor"),
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """``count`` devices of one kind; ranks follow one another on hosts of eight."""

    count: int
    device: Device

    def __str__(self) -> str:
        return f"{self.count} x {self.device.name}"


def hosts(count: int, device: Device) -> int:
    """The number of hosts that ``count`` devices need; the last one may not be full."""
    return -(-count // int(GPUS_OF_HOST.value)) if device.is_gpu else 1


_FORM = re.compile(r"(?:(\d{1,6})x)?([a-z][a-z0-9]*)", re.ASCII)


def cluster(text: str) -> Cluster:
    """The cluster that ``8xh100`` names; ``h100`` is one device.

    Raises:
        ConfigError: the text has another form, or names an unknown device.
    """
    found = _FORM.fullmatch(text.strip().lower())
    name, count = ("", 0) if found is None else (found[2], int(found[1] or 1))
    if count == 0:
        raise ConfigError(
            f"--gpus {text!r}: write the number (below a million) and the kind of the devices, such as 8xh100"
        )
    if name not in DEVICES:
        raise ConfigError(f"--gpus {text!r}: unknown device {name!r}; {did_you_mean(name, list(DEVICES))}")
    device = DEVICES[name]
    if not device.is_gpu:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        device = replace(device, memory=host / count)
    return Cluster(count, device)


def device_named(name: str) -> Device | None:
    """The device whose name is part of what a driver reports, such as ``NVIDIA H100 80GB HBM3``."""
    kind = gpu_kind(name, (key for key, each in DEVICES.items() if each.is_gpu))
    return DEVICES[kind] if kind else None


@dataclass(frozen=True)
class Assumptions:
    """Figures that nobody publishes; `capt bench scale` says of each what it is. The defaults are the central case.

    The first, second and fourth are fitted to twelve steps of CAPT-Large on one H200 (docs/benchmarks/gpu.md), which
    they give within 13%; the others are guesses.
    """

    products: float = 0.58
    memory: float = 0.58
    launch: float = 5e-6
    fused_bytes: float = 0.75
    fused_operators: float = 0.35
    links: float = 0.80
    rails: bool = True
    zero_hidden: float = 0.5


CENTRAL = Assumptions()
SLOW = replace(
    CENTRAL, products=0.48, memory=0.48, launch=9e-6, fused_bytes=0.9, fused_operators=0.5, rails=False, zero_hidden=0.0
)
"""Every assumption set so that a step takes longer."""
FAST = replace(
    CENTRAL, products=0.70, memory=0.75, launch=3.5e-6, fused_bytes=0.5, fused_operators=0.25, links=0.9,
    zero_hidden=1.0,
)  # fmt: skip
"""Every assumption set so that a step takes less time."""

Case = Literal["central", "slow", "fast"]
CASES: dict[Case, Assumptions] = {"central": CENTRAL, "slow": SLOW, "fast": FAST}
