"""Where Python keeps the sockets through which a rank and its data workers exchange tensors.

A rank that is killed does not remove them, so the launcher hands down a folder that it removes itself
(``CAPT_SCRATCH``, :mod:`capt.launcher.supervisor.ranks`). Other temporary files stay where they are: what torch has
compiled, and local checkpoints, are for the next start.
"""

from __future__ import annotations

import os
import tempfile
from multiprocessing import util
from pathlib import Path

SCRATCH = "CAPT_SCRATCH"


def use_scratch() -> None:
    """Have this process and its workers keep their sockets in the launcher's folder, if there is one."""
    folder = os.environ.pop(SCRATCH, "")
    if not folder or not Path(folder).is_dir():
        return
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        util.get_temp_dir()  # made at the first call, and kept
    finally:
        tempfile.tempdir = before
