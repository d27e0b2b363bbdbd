"""How many files this process may have open."""

from __future__ import annotations

import resource
import sys

_OWN = 256


def allow_open_files(more: int) -> int:
    """Raise this process's limit (usually 1,024) to what it needs with ``more`` connections, as far as it may.

    Returns the limit as it is then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OWN + more if hard == resource.RLIM_INFINITY else min(_OWN + more, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize
