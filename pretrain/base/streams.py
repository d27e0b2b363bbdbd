"""The standard streams: those that a process was started without, and which of them takes colours.

Python has None for a stream that is closed (``>&-``, some daemons), and its number goes to the next file that is
opened: what a library prints would be written into a checkpoint or a page of heartbeats. Such a stream becomes
``/dev/null``.
"""

from __future__ import annotations

import os
import sys
from io import TextIOBase
from typing import TextIO

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


def takes_colours(stream: TextIO | TextIOBase) -> bool:
    """Whether a stream is a terminal that shows colours, and the user has not refused them (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, code: str) -> str:
    """Return ``text`` in a colour or style of ANSI terminals: ``1`` is bold, ``36`` cyan, ``1;31`` bold red."""
    return f"\x1b[{code}m{text}\x1b[0m"


def error_line(text: str, stream: TextIO | TextIOBase) -> str:
    """Return the line that reports an error on ``stream``."""
    return f"{coloured('error:', '1;31') if takes_colours(stream) else 'error:'} {text}"
