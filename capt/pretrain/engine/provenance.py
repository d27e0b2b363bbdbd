"""Origin of a run: code revision, package versions, Python, host kind."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("capt-pretraining", "torch", "deepspeed", "transformers", "tokenizers", "datasets", "safetensors", "numpy")

_CORES = " cores"


@functools.cache
def provenance() -> dict[str, str]:
    """Git revision (with ``+changes`` when the tree is not clean), package versions, Python and platform."""
    facts = {"python": platform.python_version(), "platform": platform.platform(), "revision": revision()}
    for name in _PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def used_versions() -> str:
    """The packages that decide the figures of an evaluation, with their versions, for its protocol line."""
    versions = provenance()
    return ", ".join(f"{name} {versions[name]}" for name in ("capt-pretraining", "torch", "transformers"))


def hardware(gpu: str | None) -> str:
    """Name the GPU, or the processor and its cores where there is none."""
    if gpu is not None:
        return gpu
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
        name = names[0].strip() if names else name
    return f"{name}, {os.cpu_count()}{_CORES}"


def gpu_kind(name: str, kinds: Iterable[str]) -> str | None:
    """The one of ``kinds`` (``h100``) that a driver's name of a device, such as ``NVIDIA H100 80GB HBM3``, holds."""
    # An RTX A1000 is no A100.
    return next((kind for kind in kinds if re.search(rf"{kind}(?!\d)", name, re.IGNORECASE)), None)


def is_processor(hardware: str) -> bool:
    """Return true where `hardware` has named a processor and not a GPU."""
    return hardware.endswith(_CORES)


def revision() -> str:
    """The git revision of the source tree, or ``unknown`` outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")
