"""Where a host keeps the ephemeral checkpoint of a run, whose it is, and when it is removed. Imports no torch.

``/dev/shm/capt-ephemeral-<user>-<hash of the run folder>/`` (0700)::

    owner.json                    the run folder, and the run's life
    checkpoints/step-00000012/    a checkpoint as all are, of which this host has some files

Every start of a job begins a *life*, which ``RUN/ephemeral.json`` names. What a host has kept of another life is
worthless: it may be of a future that did not come. Before the first step each host that has the checkpoint from which
the job continues makes it one of the new life; until all have, the life before counts as well. A host that was left out
and comes back is thus known for what it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from pretrain.base.errors import CheckpointError, UserError
from pretrain.base.files import is_utf8, write_json
from pretrain.base.records import Record, read_record
from pretrain.engine.run_folder import is_active

LIFE, OWNER = "ephemeral.json", "owner.json"
_PREFIX = "capt-ephemeral"
MEMORY = Path("/dev/shm")
KEPT = 24 * 3600.0
"""Seconds after which the state of a run that nobody has continued may be removed."""


_Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_STARTS = 100
"""Starts in a row that end before their first step, after which the oldest life is forgotten."""


class Life(Record):
    """``RUN/ephemeral.json``: the life, and those that count too while a job starts."""

    life: _Id
    before: list[_Id] = Field([], max_length=_STARTS)


class Owner(Record):
    """``owner.json``: the run folder, and its life. A path that is no UTF-8, as JSON must be, is hexadecimal."""

    run: str = Field(max_length=10_000, pattern=r"\A(/[^\x00]*|(0[1-9a-f]|[1-9a-f][0-9a-f])+)\z")
    life: _Id

    @classmethod
    def of(cls, run: Path, life: str) -> Owner:
        """The owner of what is kept of a run in a life."""
        path = os.path.realpath(run)
        return cls(run=path if is_utf8(path) else os.fsencode(path).hex(), life=life)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run if self.run.startswith("/") else os.fsdecode(bytes.fromhex(self.run)))


def places(given: Path | None) -> list[Path]:
    """The folders in which this host may keep ephemeral checkpoints, the best first."""
    if given is not None:
        return [given]
    return [*([MEMORY] if MEMORY.is_dir() else []), Path(tempfile.gettempdir())]


def folder_of(place: Path, run: Path) -> Path:
    """The folder of a run in a place."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(run))).hexdigest()[:16]
    return place / f"{_PREFIX}-{os.geteuid()}-{name}"


def is_private(folder: Path) -> bool:
    """Whether a folder is there that is this user's alone. In a place for all, somebody else may have made it.

    Raises:
        CheckpointError: something else is there.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise CheckpointError(f"{folder} is not a private folder of this user: remove it")
    return True


def claim(folder: Path, run: Path, life: str, before: Sequence[str] = ()) -> None:
    """Make a run's folder, or the one that is there, one of this life. What is of neither it nor ``before`` goes.

    Raises:
        CheckpointError: something else is there.
        OSError: it cannot be written.
    """
    own = Owner.of(run, life)
    known = owner_of(folder) if (there := is_private(folder)) else None
    if there and (known is None or known.run != own.run or known.life not in (life, *before)):
        remove(folder)
        there = False
    if not there:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    if known != own:
        write_json(folder / OWNER, own.model_dump(), private=True)


def adopt(where: Sequence[Path], run: Path, lives: Sequence[str]) -> None:
    """Give a run that was moved, and whose ``lives`` count, what this host has of it under the name of its old path.

    What is of a life that a run at the old path still has stays: the run was copied.
    """
    own = Path(os.path.realpath(run))
    for place in where:
        folder = folder_of(place, run)
        for other in sorted(place.glob(f"{_PREFIX}-{os.geteuid()}-*")):
            with suppress(UserError, OSError):
                owner = owner_of(other) if other != folder and is_private(other) else None
                if owner is None or owner.life not in lives or is_private(folder):
                    continue
                if owner.folder == own or owner.life not in lives_of(owner.folder):
                    write_json(other / OWNER, Owner.of(run, owner.life).model_dump(), private=True)
                    other.rename(folder)


def owner_of(folder: Path) -> Owner | None:
    """Whose a private folder is; None where that cannot be read."""
    with suppress(UserError, OSError):
        return read_record(Owner, folder / OWNER, error=CheckpointError)
    return None


def lives_of(run: Path) -> tuple[str, ...]:
    """The lives of a run that count, the newest first; none where it has none that can be read."""
    with suppress(UserError, OSError):
        known = read_record(Life, run / LIFE, error=CheckpointError)
        return known.life, *known.before
    return ()


def begin_life(run: Path, before: Sequence[str] = ()) -> str:
    """Give a run a new life and return it; those ``before`` count until :func:`settle_life`. Raises ``OSError``."""
    life = uuid.uuid4().hex
    write_json(run / LIFE, Life(life=life, before=list(before)[:_STARTS]).model_dump())
    return life


def settle_life(run: Path, life: str) -> None:
    """From now on only this life counts. Raises ``OSError``."""
    write_json(run / LIFE, Life(life=life).model_dump())


def room(place: Path) -> int:
    """Bytes that may be written to a place; a tenth of it, and where it is memory of the host's, is left to others."""
    place = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    usage = shutil.disk_usage(place)
    free = usage.free - usage.total // 10
    return min(free, available_memory()) if _is_memory(place) else free


def _is_memory(place: Path) -> bool:
    """Whether a folder lies in main memory."""
    best, kind = "", ""
    with suppress(OSError):
        path = os.path.realpath(place)
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            _, where, what, *_ = line.split(" ")
            inside = path == where or path.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best):
                best, kind = where, what
    return kind in ("tmpfs", "ramfs")


def available_memory() -> int:
    """Bytes of memory that this host, or the container that it is, has to give; a tenth of all is held back."""
    left = [1 << 62]
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        info = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        left.append(info["MemAvailable"] - info["MemTotal"] // 10)
    for limit, used, given_back in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, KeyError, ValueError):  # no such limit, which is then the word "max"
            group = Path("/sys/fs/cgroup")
            most = int((group / limit).read_text())
            figures = dict(
                line.split(" ") for line in (group / limit).with_name("memory.stat").read_text().splitlines()
            )
            left.append(most - most // 10 - int((group / used).read_text()) + int(figures[given_back]))
    return min(left)


def remove(folder: Path) -> None:
    """Remove the folder of a run: the record of its owner first, without which nothing in it is used."""
    (folder / OWNER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def remove_stale(where: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Remove what is of no use any more, of all runs of this user; yields each folder and the reason.

    Never touched: what belongs to a run in which a process trains.
    """
    for place in where:
        for folder in sorted(place.glob(f"{_PREFIX}-{os.geteuid()}-*")):
            with suppress(UserError, OSError):
                if is_private(folder) and (reason := _stale(folder)):
                    remove(folder)
                    yield folder, reason


def _stale(folder: Path) -> str:
    owner = owner_of(folder)
    if owner is None:
        young = time.time() - folder.stat().st_mtime < 60  # it may be in the making
        return "" if young else "nobody's"
    run = owner.folder
    if not run.is_dir():
        return f"{run} is gone"
    if is_active(run):
        return ""
    if owner.life not in lives_of(run):
        return f"{run} continued without it"
    step = max(_steps(folder), default=-1)
    if max(_steps(run), default=-1) >= step:
        return f"{run} has a checkpoint that is as new"
    if time.time() - newest_change(folder) > KEPT:
        return f"{run} was not continued for a day"
    return ""


def _steps(folder: Path) -> list[int]:
    names = [path.parent.name for path in (folder / "checkpoints").glob("step-*/manifest.json")]
    return [int(name[5:]) for name in names if name[5:].isdecimal()]


def newest_change(folder: Path) -> float:
    """When the newest checkpoint of a folder was completed (seconds since the epoch)."""
    times = [path.stat().st_mtime for path in (folder / "checkpoints").glob("step-*/manifest.json")]
    return max(times, default=folder.stat().st_mtime)
