"""Keeps modules of the user's working folder out of a process that was started as ``python -m``."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def drop_working_folder() -> None:
    """Do what ``PYTHONSAFEPATH`` does, after the start: Python put the working folder first on the module path.

    A working folder that holds this program (a source checkout) stays on the path. Child processes get the variable.
    """
    if not sys.flags.safe_path and sys.path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[2]:
        del sys.path[0]
    protect_children()


def protect_children() -> None:
    """Let every process that this one starts ignore modules of its working folder.

    An empty entry of ``PYTHONPATH`` (``PYTHONPATH=:/my/modules``) means the working folder, too, and is removed.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, os.environ["PYTHONPATH"].split(os.pathsep)))
