"""Judges one host by itself: shared memory, open files, apex, GPUs; and the disk of the run folder."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.check import Check
from launcher.preflight.facts import Facts

_SHM_SLOT = 32 << 20
"""Free bytes of ``/dev/shm`` below which a rank's collectives or loader workers end in a bus error."""
_SHM_MIN = 512 << 20
_DESCRIPTORS_MIN, _DESCRIPTORS_USUAL = 256, 1024


def limits(facts: Facts, slots: int, host: str = "") -> Iterator[Check]:
    """What ``slots`` processes on a host would miss; only what is not in order."""
    yield from shared_memory(facts.shm_total, facts.shm_free, slots, host)
    yield from descriptors(facts.descriptors, host)
    yield from apex(facts.apex, facts.apex_place, host)
    yield from gpus(facts, slots, host)


def shared_memory(total: int, free: int, slots: int, host: str = "") -> Iterator[Check]:
    """``/dev/shm`` must have room for every process; systems without one (``total`` -1) are left alone."""
    finding = f"/dev/shm has {size(free)} free of {size(total)} for {slots} processes"
    if 0 <= free < slots * _SHM_SLOT:
        advice = "in a container --ipc=host or --shm-size=16g; else remove what lies in /dev/shm"
        yield Check("shared memory", "fail", finding, advice, host)
    elif 0 <= total < _SHM_MIN:
        advice = "NCCL and data workers need more: docker run --ipc=host, or --shm-size=16g"
        yield Check("shared memory", "warn", finding, advice, host)


def descriptors(limit: int, host: str = "") -> Iterator[Check]:
    """How many files a process may have open; -1 is no limit."""
    if 0 <= limit < _DESCRIPTORS_USUAL:
        level, least = ("fail" if limit < _DESCRIPTORS_MIN else "warn"), _DESCRIPTORS_USUAL
        advice = f"ulimit -n {least} in the shell that starts the ranks, or nofile in /etc/security/limits.conf"
        yield Check("open files", level, f"a process may have {limit} files open (ulimit -n)", advice, host)  # type: ignore[arg-type]


def apex(kind: str, place: str, host: str = "") -> Iterator[Check]:
    """PyPI's unrelated project is where libraries look for NVIDIA's."""
    if kind == "unrelated":
        advice = "pip uninstall apex; NVIDIA's is built from github.com/NVIDIA/apex, or comes with its PyTorch images"
        yield Check("apex", "fail", f"{place} is PyPI's unrelated web toolkit, not NVIDIA's", advice, host)


def gpus(facts: Facts, slots: int, host: str = "") -> Iterator[Check]:
    """A process needs a GPU of its own where there are any."""
    if facts.gpu_problem:
        yield Check("GPUs", "fail", f"nvidia-smi: {facts.gpu_problem}", "check the driver", host)
    elif facts.gpus and slots > len(facts.gpus):
        advice = f"slots={len(facts.gpus)} in the hostfile"
        yield Check("GPUs", "fail", f"{len(facts.gpus)} for {slots} slots", advice, host)


def disk(free: int, one: int | None, copies: int, folder: str) -> Check:
    """Room for ``copies`` more checkpoints of ``one`` bytes; None where the configuration does not tell their size."""
    has = f"{size(free)} free at {folder}"
    if one is None:
        return Check("disk", "note", f"{has}; the size of a checkpoint is not known from the configuration")
    plural = f"{copies} checkpoints" if copies > 1 else "one more checkpoint"
    finding = f"{has}; {plural} of about {size(one)}"
    if free < one * copies:
        advice = f"free {size(one * copies - free)}, lower checkpoint.keep, or set run.dir on a larger disk"
        return Check("disk", "fail", f"{finding} need {size(one * copies)}", advice)
    return Check("disk", "ok", finding)


def size(count: int) -> str:
    """A number of bytes for a person."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" or value >= 10 else f"{value:.1f} {unit}"
