"""The report of a crash: one JSON file in the run folder, and one line for people."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path

from pydantic import Field

from pretrain.base.errors import ConfigError
from pretrain.base.files import require_own_folder, write_json
from pretrain.base.records import Count, Record
from pretrain.engine.run_folder import CRASHES

log = logging.getLogger(__name__)

_KEPT = 20
_NAME = re.compile(r"(\d{4,9})\.json", re.ASCII)


class Crash(Record):
    """What ended a job. ``signal`` is the name of the one that killed the rank; ``stacks`` are of a rank that hung."""

    cause: str = Field(max_length=2000)
    host: str = Field(max_length=256)
    rank: Count | None = None
    pid: Count | None = None
    step: Count | None = None
    section: str | None = Field(None, max_length=20)
    signal: str | None = Field(None, max_length=20)
    stacks: str = Field("", max_length=200_000)

    @classmethod
    def here(cls, cause: str, **facts: object) -> Crash:
        """A crash on this host."""
        return cls.model_validate({"cause": cause, "host": socket.gethostname(), **facts})


def write_crash(run: Path, crash: Crash) -> Path | None:
    """Write the next ``RUN/crashes/NNNN.json``, keep the newest twenty, and return the file.

    None, with a warning, where nothing can be written: a full disk or a link must not hide what went wrong. Files of
    other names are nobody's business.
    """
    folder = run / CRASHES
    try:
        require_own_folder(folder, error=ConfigError)
        folder.mkdir(exist_ok=True)
        older = sorted((int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
        path = folder / f"{older[-1][0] + 1 if older else 1:04d}.json"
        write_json(path, crash.model_dump())
        for _, old in older[: max(0, len(older) + 1 - _KEPT)]:
            old.unlink(missing_ok=True)
    except (ConfigError, OSError) as error:
        log.warning("no report of this crash is written: %s", error)
        return None
    return path
