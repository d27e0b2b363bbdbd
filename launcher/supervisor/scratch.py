"""A folder for what ranks keep on disk while they run: removed when they have ended, however they ended."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from capt.pretrain.engine.scratch import SCRATCH

_PREFIX = "capt-r-"
_LONGEST = 70
"""Bytes of the name of the folder: sockets in it have names of at most 107."""
_SHORT = "/tmp"
"""Where the folder lies if the name of that for temporary files (``TMPDIR``) is too long for sockets."""


class Scratch:
    """A private folder among the temporary files, locked for as long as this process lives.

    A killed process cannot remove its folder. The next one on the host does: a folder that is not locked is nobody's.
    Those of other hosts, whose locks some file systems do not show here, have other names.
    Where none can be made there is none, and the sockets of killed ranks stay where Python puts them.
    """

    def __init__(self) -> None:
        _remove_nobodys()
        self._path: Path | None = None
        while self._path is None:
            try:
                path = Path(tempfile.mkdtemp(prefix=_own_prefix(), dir=_place()))
            except OSError:  # a folder that cannot be written to
                return
            try:
                self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another process has taken it for nobody's
                continue
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if path.is_dir():  # nor has it between these two calls
                self._path = path
            else:
                os.close(self._lock)

    @property
    def env(self) -> dict[str, str]:
        """How a rank finds it."""
        return {SCRATCH: str(self._path)} if self._path else {}

    def close(self) -> None:
        """Remove the folder, and what is in it."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._lock)
            self._path = None


def _own_prefix() -> str:
    return f"{_PREFIX}{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:4]}-"


def _place() -> str:
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + len(_own_prefix()) + 9 <= _LONGEST else _SHORT


def _remove_nobodys() -> None:
    for path in Path(_place()).glob(f"{_own_prefix()}*"):
        with suppress(OSError):  # it is locked, or no folder of ours
            found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(found).st_uid == os.geteuid():
                    fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(found)
