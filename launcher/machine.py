"""Facts about this machine, without torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def memory() -> int:
    """Return the bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpus() -> tuple[list[str], str]:
    """Name, memory and driver of each NVIDIA GPU, and what is wrong with the driver (empty if nothing)."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0:
        return [], " ".join((answer.stderr or answer.stdout).split())
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()], ""


def hardware_summary() -> str:
    """Describe processor, cores, memory and GPUs in one line."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return "; ".join([model, f"{cores()} cores", f"{memory() / 2**30:.0f} GiB", *gpus()[0]])
