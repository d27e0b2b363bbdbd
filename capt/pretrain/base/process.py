"""What a process has from the one that started it: streams, variables, command line, open files; when one began.

Python has None for a stream that is closed (``>&-``, some daemons), and its number goes to the next file that is
opened: what a library prints would be written into a checkpoint or a page of heartbeats. Such a stream becomes
``/dev/null``.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from io import TextIOBase
from pathlib import Path
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


# What a process that was started for a job has from the one that started it: its variables, and its end.


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


# How many files this process may have open.


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


def born(pid: int) -> int | None:
    """When a process began, in ticks since its host was started; None where there is none, or only its remains.

    A number of a process is given again. Together with this one it means one process, until the host is started again.
    A process whose first thread has ended holds its files and locks until the last one has, which may be in a write.
    """
    try:
        # The name before the last bracket may hold brackets; then come the fields of proc(5) from the third on.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, threads, begun = fields[0], int(fields[17]), int(fields[19])
        return None if state in "ZX" and threads < 2 else begun
    except (OSError, IndexError, ValueError):
        return None


def boot_id() -> str:
    """What is new with every start of this host; empty where the kernel does not say. Containers of a host share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def with_value_of_resume(words: Sequence[str]) -> list[str]:
    """A command line in which ``--resume`` has a value: ``auto`` where that follows it, else ``always``."""
    result: list[str] = []
    for word in words:
        if word == "auto" and result[-1:] == ["--resume=always"]:
            result[-1] = "--resume=auto"
        else:
            result.append("--resume=always" if word == "--resume" else word)
    return result


SCRATCH = "CAPT_SCRATCH"
"""Variable that names the folder which the launcher hands down (`capt.launcher.supervisor.ranks`)."""


def use_scratch() -> None:
    """Have a rank and its data workers keep the sockets by which they exchange tensors in the launcher's folder.

    A rank that is killed does not remove them; the launcher removes the folder. Other temporary files stay where they
    are: what torch has compiled, and local checkpoints, are for the next start.
    """
    import tempfile
    from multiprocessing import util

    folder = os.environ.pop(SCRATCH, "")
    if not folder or not Path(folder).is_dir():
        return
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        util.get_temp_dir()  # made at the first call, and kept
    finally:
        tempfile.tempdir = before
