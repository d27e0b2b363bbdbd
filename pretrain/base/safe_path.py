"""Keeps modules of the user's working folder out of a process that was started as ``python -m``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PROGRAM = Path(__file__).resolve().parents[2]


def drop_working_folder() -> None:
    """Do what ``PYTHONSAFEPATH`` does, after the start: Python put the working folder first on the module path.

    A working folder that holds this program (a source checkout) stays on the path. Child processes get the variable.
    """
    if not sys.flags.safe_path and sys.path and Path(sys.path[0]).resolve() != _PROGRAM:
        del sys.path[0]
    protect_children()


def protect_children() -> None:
    """Let every process that this one starts ignore modules of its working folder.

    An empty entry of ``PYTHONPATH`` (``PYTHONPATH=:/my/modules``) means the working folder, too. It is removed, also
    from the module path of this process; a working folder that ``PYTHONPATH`` names, if only by a dot, stays.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if len(entries) == 1 or "" not in entries:
        return
    named = [entry for entry in entries if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join(named)
    here = Path.cwd()
    if here != _PROGRAM and here not in (Path(entry).absolute() for entry in named):
        sys.path[:] = [entry for entry in sys.path if entry not in ("", str(here))]
