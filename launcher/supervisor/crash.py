"""The report of a crash: one JSON file in the run folder, and one line for people."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from pretrain.base.files import write_json
from pretrain.base.records import Count, Record

CRASHES = "crashes"
_KEPT = 20


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

    None where nothing can be written: a full disk must not hide what went wrong.
    """
    with suppress(OSError):
        folder = run / CRASHES
        folder.mkdir(exist_ok=True)
        older = sorted(folder.glob("[0-9]*.json"))
        path = folder / f"{int(older[-1].stem) + 1 if older else 1:04d}.json"
        write_json(path, crash.model_dump())
        for old in older[: max(0, len(older) + 1 - _KEPT)]:
            old.unlink(missing_ok=True)
        return path
    return None
