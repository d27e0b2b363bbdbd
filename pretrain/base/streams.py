"""Standard streams that a process was started without (``>&-``, some daemons): they become ``/dev/null``.

Python has None for such a stream, and its number goes to the next file that is opened: what a library prints would be
written into a checkpoint or a page of heartbeats.
"""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Open those of the descriptors 0 to 2 that are closed, for this process and all that it starts."""
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(null, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
