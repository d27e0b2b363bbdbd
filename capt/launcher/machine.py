"""Facts about this machine, without torch."""

from __future__ import annotations

import platform
from pathlib import Path

from capt.launcher.preflight import probe
from capt.pretrain.base.process import host_memory, usable_cores


def gpus() -> tuple[list[str], str]:
    """Name, memory and driver of each NVIDIA GPU, and what is wrong with the driver (empty if nothing)."""
    cards, problem = probe.gpus()
    return [", ".join(card) for card in cards], problem


def hardware_summary() -> str:
    """Describe processor, cores, memory and GPUs in one line."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return "; ".join([model, f"{usable_cores()} cores", f"{host_memory() / 2**30:.0f} GiB", *gpus()[0]])
