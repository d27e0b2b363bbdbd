"""How the C library hands memory back to the kernel, which on CPUs decides a fifth of a training step."""

from __future__ import annotations

import ctypes
import logging

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
