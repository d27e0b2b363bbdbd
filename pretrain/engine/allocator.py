"""How the C library hands memory back to the kernel, which on CPUs decides a fifth of a training step."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = 2**31 - 1
_MAPPED_FROM = 1 << 30


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks of up to 1 GiB for the next allocation; False where it is another C library.

    Every training step frees and allocates the same large tensors. By default glibc gives such blocks back to the
    kernel, and the next step pays for each of their pages being mapped and zeroed again. Call before building a model.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    done = bool(mallopt(_MMAP_THRESHOLD, _MAPPED_FROM)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
    logger.debug("freed memory is %s", "kept" if done else "given back to the kernel")
    return done
