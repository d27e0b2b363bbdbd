"""How the C library hands memory back to the kernel, which on CPUs decides a fifth of a training step."""

from __future__ import annotations

import ctypes
import logging

import torch

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.randomness import derive

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

    For a process that assembles batches ahead of the training: blocks of several batches lie between one another, and
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


# Checks whether this machine computes in the precision that a job asks for.


def check_precision(precision: str) -> None:
    """Ask DeepSpeed's accelerator whether the device of this process computes in ``engine.precision``.

    Numbers of 16 bits that are emulated count as missing: such a job would run many times slower than in fp32.

    Raises:
        ConfigError: it does not.
    """
    if precision == "fp32":
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    gpu = accelerator.device_name() == "cuda"
    has = {"fp16": bool(accelerator.is_fp16_supported()), "bf16": bool(accelerator.is_bf16_supported())}
    if gpu:
        import torch

        has["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    if has[precision]:
        return
    fits = " or ".join(["fp32", *(name for name, supported in has.items() if supported)])
    raise ConfigError(
        f"engine.precision {precision}: this machine's {'GPU' if gpu else 'CPU'} has no {precision} units; use {fits}"
    )
