"""The private file in which a host remembers what it has verified."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from pretrain.base.errors import UserError
from pretrain.base.files import SMALL, is_utf8, open_regular, write_text
from pretrain.base.hashing import FileState

logger = logging.getLogger(__name__)

REMEMBERED = 50_000
"""Files that the memory of a host holds at most, the newest."""
LIFE = 30 * 86400
"""Seconds after which a file is read again: a disk may lose bits of a file that nobody writes."""


class VerifiedFile(NamedTuple):
    """The SHA-256 that a file had in a certain state, the name of the inspection that it passed then, and the time."""

    path: str
    state: FileState
    sha256: str
    inspection: str
    at: int = 0
    """Seconds since 1970 at which it was read."""


_MEMORY = TypeAdapter(Sequence[tuple[str, tuple[int, int, int, int, int], str, str, int]])


def read_verified(path: Path) -> list[VerifiedFile]:
    """The files of a memory that were read in the last `LIFE` seconds, oldest first.

    None when it is missing, damaged, or others can read or write it.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077 or status.st_size > SMALL:
                logger.info("%s is not a private file of ours: not used", path)
                return []
            entries = _MEMORY.validate_json(file.read(), strict=True)
    except FileNotFoundError:
        return []
    except (OSError, UserError, ValidationError, ValueError) as problem:
        logger.info("%s cannot be used (%s): files are hashed again", path, str(problem).splitlines()[0])
        return []
    now = time.time()
    return [
        VerifiedFile(name, FileState(*state), digest, inspection, at)
        for name, state, digest, inspection, at in entries
        if now - LIFE < at <= now
    ]


def write_verified(path: Path, new: Sequence[VerifiedFile]) -> None:
    """Add files to the memory, as read now. Of two processes that add at the same time, one may lose what it adds.

    A path that is no UTF-8 is left out, for JSON cannot hold it: such files are hashed again.
    """
    entries = {seen.path: seen for seen in read_verified(path)}
    for seen in (seen for seen in new if is_utf8(seen.path)):
        entries.pop(seen.path, None)
        entries[seen.path] = seen._replace(at=int(time.time()))
    newest = list(entries.values())[-REMEMBERED:]
    with suppress(OSError):  # a cache that cannot be written costs time, not the job
        write_text(path, _MEMORY.dump_json(newest).decode(), private=True)
