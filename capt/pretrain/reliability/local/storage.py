"""The storage of local checkpoints on a host: where it is, which run owns it, when it is removed. Imports no torch.

``/dev/shm/capt-local-<user>-<hash of the run folder>/`` (0700)::

    owner.json                    the run folder, and the incarnation of the run
    checkpoints/step-00000012/    a checkpoint in the usual format, of which this host has some files

Every start of a job begins an *incarnation* of the run, which ``RUN/incarnation.json`` names. The storage of another
incarnation is not used: it may hold steps that the run has done again since. Before the first step, each host that has
the checkpoint from which the job continues relabels it with the new incarnation; until all have, the previous
incarnation is valid as well. So a host that was left out and comes back is recognised.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from capt.pretrain.base.errors import CheckpointError, ConfigError, UserError
from capt.pretrain.base.files import is_utf8, write_json
from capt.pretrain.base.records import Record, read_record
from capt.pretrain.config.load import load_job
from capt.pretrain.engine.run_folder import CONFIG, holds_run, is_active
from capt.pretrain.engine.step_folders import MANIFEST, checkpoints_of, steps_of

INCARNATION, OWNER = "incarnation.json", "owner.json"
_PREFIX = "capt-local"
MEMORY = Path("/dev/shm")
KEPT = 24 * 3600.0
"""Seconds after which the storage of a run that nobody has continued may be removed."""
LEFT_ON_DISK = 4 << 30
"""Bytes of a disk that local checkpoints leave to others at most."""
_STARTS = 100
"""Starts in a row that may end before their first step; after more, the oldest incarnation is no longer valid."""

_Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Incarnation(Record):
    """``RUN/incarnation.json``: the incarnation, and earlier ones that are valid while a job starts."""

    incarnation: _Id
    before: list[_Id] = Field([], max_length=_STARTS)


class Owner(Record):
    """``owner.json``: the run folder, and its incarnation. A path that is not UTF-8 is written in hexadecimal."""

    run: str = Field(max_length=10_000, pattern=r"\A(/[^\x00]*|(0[1-9a-f]|[1-9a-f][0-9a-f])+)\z")
    incarnation: _Id

    @classmethod
    def of(cls, run: Path, incarnation: str) -> Owner:
        """Return the owner for a run and its incarnation."""
        path = os.path.realpath(run)
        return cls(run=path if is_utf8(path) else os.fsencode(path).hex(), incarnation=incarnation)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run if self.run.startswith("/") else os.fsdecode(bytes.fromhex(self.run)))


def location_of(given: Path | None) -> Path:
    """Return the folder that holds the storage on this host: the ``given`` one, else the memory, where there is one."""
    return given or (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))


def storage_of(given: Path | None, run: Path) -> Path:
    """Return the storage of a run, a folder in the location."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(run))).hexdigest()[:16]
    return location_of(given) / f"{_PREFIX}-{os.geteuid()}-{name}"


def is_private(storage: Path) -> bool:
    """Return whether the storage exists as a folder of this user alone. Raises ``CheckpointError``: it is another's."""
    try:
        found = storage.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise CheckpointError(f"{storage} is not a private folder of this user: remove it")
    return True


def prepare(storage: Path, run: Path, incarnation: str, before: Sequence[str] = ()) -> None:
    """Make the storage of an incarnation, or relabel it. Contents that are neither of it nor of ``before`` are removed.

    Raises:
        CheckpointError: something else is there.
        OSError: it cannot be written.
    """
    own = Owner.of(run, incarnation)
    known = owner_of(storage) if (there := is_private(storage)) else None
    if there and (known is None or known.run != own.run or known.incarnation not in (incarnation, *before)):
        remove(storage)
        there = False
    if not there:
        storage.parent.mkdir(parents=True, exist_ok=True)
        storage.mkdir(mode=0o700)
    if known != own:
        write_json(storage / OWNER, own.model_dump(), private=True)


def owner_of(storage: Path) -> Owner | None:
    """Return the owner of a private storage; None where the record cannot be read."""
    with suppress(UserError, OSError):
        return read_record(Owner, storage / OWNER, error=CheckpointError)
    return None


def incarnations_of(run: Path) -> tuple[str, ...]:
    """Return the valid incarnations of a run, the newest first; none where the record is missing or damaged."""
    with suppress(UserError, OSError):
        known = read_record(Incarnation, run / INCARNATION, error=CheckpointError)
        return known.incarnation, *known.before
    return ()


def write_incarnations(run: Path, incarnation: str, *before: str) -> None:
    """Make ``incarnation`` that of a run; those ``before`` stay valid until the next call."""
    write_json(run / INCARNATION, Incarnation(incarnation=incarnation, before=list(before[:_STARTS])).model_dump())


def remove(storage: Path) -> None:
    """Remove the storage of a run: the owner first, without which nothing in it is used."""
    (storage / OWNER).unlink(missing_ok=True)
    shutil.rmtree(storage)


def remove_stale(location: Path) -> Iterator[tuple[Path, str]]:
    """Remove every storage of this user in ``location`` that is of no more use; yield each with the reason.

    The storage of a run in which a process trains stays.
    """
    for storage in sorted(location.glob(f"{_PREFIX}-{os.geteuid()}-*")):
        with suppress(UserError, OSError):
            if is_private(storage) and (reason := _stale(storage)):
                remove(storage)
                yield storage, reason


def clean(runs: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Remove the local checkpoints of ``runs``, or without runs all that are of no more use, and yield each.

    Raises:
        ConfigError: a folder holds no run, or a process trains in it.
    """
    if not runs:
        yield from remove_stale(location_of(None))
    for run in runs:
        if not holds_run(run):
            raise ConfigError(f"{run} holds no run; name a run folder")
        if is_active(run):
            raise ConfigError(f"{run}: a process is training in this folder; stop it first")
        (run / INCARNATION).unlink(missing_ok=True)
        own = storage_of(load_job(run / CONFIG, resolved=True).checkpoint.local.dir, run)
        if is_private(own):
            remove(own)
            yield own, "as asked for"


def _stale(storage: Path) -> str:
    owner = owner_of(storage)
    if owner is None:
        young = time.time() - storage.stat().st_mtime < 60  # another process may be making it
        return "" if young else "it has no owner"
    run = owner.folder
    if not run.is_dir():
        return f"{run} is gone"
    if is_active(run):
        return ""
    if owner.incarnation not in incarnations_of(run):
        return f"{run} went on without it"
    if max(steps_of(run), default=-1) >= max(steps_of(storage), default=-1):
        return f"{run} has a checkpoint that is as new"
    if time.time() - newest_change(storage) > KEPT:
        return f"{run} was not continued for a day"
    return ""


def newest_change(storage: Path) -> float:
    """Return when the newest checkpoint of a storage was completed (seconds since the epoch)."""
    written = ((path / MANIFEST).stat().st_mtime for path in checkpoints_of(storage))
    return max(written, default=storage.stat().st_mtime)


def free_bytes(location: Path) -> int:
    """Return the bytes that may be written to a location.

    A tenth of memory is left to others; of a disk a tenth too, and 4 GiB at most: a large disk that is nearly full
    still has room for a checkpoint.
    """
    location = next(folder for folder in (location, *location.absolute().parents) if folder.exists())
    usage = shutil.disk_usage(location)
    if _is_memory(location):
        return min(usage.free - usage.total // 10, available_memory())
    return usage.free - min(usage.total // 10, LEFT_ON_DISK)


def _is_memory(location: Path) -> bool:
    """Return whether a folder is in main memory."""
    device = location.stat().st_dev
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            # mountinfo(5): the third field is the device, and the kind of file system comes after the dash.
            mount, _, kind = line.partition(" - ")
            if mount.split(" ")[2] == f"{os.major(device)}:{os.minor(device)}":
                return kind.split(" ")[0] in ("tmpfs", "ramfs")
    return False


def available_memory() -> int:
    """Return the bytes of memory that the host and the container have free; a tenth of all is held back."""
    left = [1 << 62]
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        info = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        left.append(info["MemAvailable"] - info["MemTotal"] // 10)
    # Cgroups of version 2, then 1. Their figure of use has cached files in it, which the kernel gives back at need.
    for limit, used, given_back in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, KeyError, ValueError):  # no such limit, which is then the word "max"
            group = Path("/sys/fs/cgroup")
            most = int((group / limit).read_text())
            lines = (group / limit).with_name("memory.stat").read_text().splitlines()
            figures = dict(line.split(" ") for line in lines)
            left.append(most - most // 10 - int((group / used).read_text()) + int(figures[given_back]))
    return min(left)
