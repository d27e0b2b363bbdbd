"""What a process that was started for a job has from the one that started it: its variables, and its end."""

from __future__ import annotations

import ctypes
import os
import signal

LISTENS, SECRET = "CAPT_LISTENS", "CAPT_SECRET"
"""Variables of a rank: the socket of the rendezvous that rank 0 inherits, and what only ranks of this job know."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux send ``number`` to this process, a child of ``parent``, when the thread that forked it ends.

    To be called in the child. Where the parent has ended already, this process ends immediately.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before prctl took hold
        os._exit(1)
