"""Settings of a rank for its process: the memory that the C library keeps, the seed of each step, and the precision."""

from __future__ import annotations

import ctypes
import logging

import torch

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import MachineError
from capt.pretrain.base.randomness import derive
from capt.pretrain.config.schema import Job

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = 2**31 - 1
_MAPPED_FROM = 1 << 30
_LARGE = 1 << 20


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks of up to 1 GiB for the next allocation; False where it is another C library.

    Every training step frees and allocates the same large tensors. By default glibc gives such blocks back to the
    kernel, and the next step pays for each of their pages being mapped and zeroed again. Call before building a model.
    """
    done = _set(mapped_from=_MAPPED_FROM, kept=_KEPT)
    logger.debug("freed memory is %s", "kept" if done else "given back to the kernel")
    return done


def give_back_freed_memory() -> bool:
    """Make glibc give blocks of 1 MiB or more back to the kernel as they are freed; False where it is another library.

    For a process that assembles batches ahead of the training: blocks of several batches alternate in memory, and
    what is kept between them would add up to hundreds of megabytes in every such process. Also undoes
    `keep_freed_memory`, which a forked process inherits.
    """
    return _set(mapped_from=_LARGE, kept=_LARGE)


def _set(*, mapped_from: int, kept: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mapped_from)) and bool(mallopt(_TRIM_THRESHOLD, kept))


# One seed for a run, spread so that what a step draws depends on the step and the rank and on nothing before it.
#
# Dropout is drawn from torch's generator, reseeded at every step: a resumed run then draws what the uninterrupted run
# drew, and no generator state has to be saved.


def seed_step(seed: int, step: int) -> None:
    """Seed torch (all devices) for this rank's step ``step``."""
    value = derive(seed, "step", step, distributed.rank())
    torch.default_generator.manual_seed(value)  # torch.manual_seed asks every backend in turn: 80 us on a CPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)


# Which precisions the device of this process computes in, and which of them a job is run in.


def check_precision(precision: str) -> None:
    """Check that the device of this process computes in ``engine.precision``.

    Numbers of 16 bits that are emulated count as missing: such a job would run many times slower than in fp32.

    Raises:
        MachineError: it does not.
    """
    if precision in ("fp32", "auto") or precision.removesuffix("_pure") in (here := device_precisions()):
        return
    device = "GPU" if torch.cuda.is_available() else "CPU"
    fits = " or ".join(["fp32", *here])
    units = precision.removesuffix("_pure")
    raise MachineError(f"engine.precision {precision}: this machine's {device} has no {units} units; use {fits}")


def device_precisions() -> list[str]:
    """Return the precisions of 16 bits that the device of this process has units for."""
    if torch.cuda.is_available():
        # Volta, the first with tensor cores.
        fp16 = torch.cuda.get_device_capability()[0] >= 7
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fp16 = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)()  # not in every build of torch
        bf16 = True
    return [name for name, has in (("fp16", fp16), ("bf16", bf16)) if has]


def with_precision(job: Job) -> Job:
    """Return ``job`` with the precision that ``auto`` means here: bf16 on a GPU that has it, else fp32."""
    if job.engine.precision != "auto":
        return job
    bf16 = torch.cuda.is_available() and "bf16" in device_precisions()
    return job.model_copy(update={"engine": job.engine.model_copy(update={"precision": "bf16" if bf16 else "fp32"})})
