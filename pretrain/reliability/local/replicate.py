"""Find the newest local checkpoint over all hosts, and give every host the files of it that it lacks."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, counted
from capt.pretrain.base.files import read_bytes
from capt.pretrain.base.hosts import Hosts, find_hosts
from capt.pretrain.base.memory import free_bytes
from capt.pretrain.base.verification import sha256
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.checkpoint import checkpoints_of, read_manifest
from capt.pretrain.engine.checkpoint.layout import MANIFEST, step_folder
from capt.pretrain.engine.checkpoint.transfer import Transfer, copy_files
from capt.pretrain.reliability.local import storage
from capt.pretrain.reliability.local.storage import INCARNATION, is_private, location_of, storage_of

logger = logging.getLogger(__name__)

_Files = Mapping[str, tuple[int, str]]
"""Size and SHA-256 of each file of a checkpoint, its manifest included."""


class _Found(NamedTuple):
    """A checkpoint of which this host has files: its folder, and all files that its manifest lists."""

    folder: Path
    files: _Files

    @property
    def key(self) -> tuple[int, str]:
        """The step and the digest of the manifest, which are the same on all hosts."""
        return int(self.folder.name[5:]), self.files[MANIFEST][1]


def newest_local(job: Job, after: int) -> Path | None:
    """Return this host's folder of the newest local checkpoint beyond step ``after``, verified. Collective.

    A file that this host lacks comes from a host that has it. None where no checkpoint is newer and complete; a line
    says what is not used (another incarnation, a file lost or damaged on every host, no room).
    """
    valid = distributed.broadcast_object(storage.incarnations_of(job.run.dir))
    if not valid:
        if (job.run.dir / INCARNATION).exists():
            _warn([f"{job.run.dir / INCARNATION} cannot be read: the run's local checkpoints are not used"])
        return None
    hosts = find_hosts()
    found, notes = _find(job, valid, after)
    answers = distributed.gather_objects(([each.key for each in found], notes) if hosts.leads else ([], []))
    holders: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, (keys, said) in enumerate(answers):
        _warn(f"host of rank {rank}: {note}" if len(hosts.ranks) > 1 else note for note in said)
        for step, digest in keys:
            holders[step, digest].append(rank)
    for key in sorted(holders, reverse=True):
        mine = next((each for each in found if each.key == key), None)
        files = distributed.broadcast_object(mine.files if mine else {}, src=holders[key][0])
        try:
            return _complete(job, valid, hosts, key[0], files, mine)
        except CheckpointError as error:
            _warn([f"the local checkpoint of step {key[0]} is not used: {error}"])
    return None


def _warn(notes: Iterable[str]) -> None:
    if distributed.rank() == 0:
        for note in notes:
            logger.warning("%s", note)


def _find(job: Job, valid: Sequence[str], after: int) -> tuple[list[_Found], list[str]]:
    """Return the checkpoints of the run on this host, and notes about what cannot be used."""
    found: list[_Found] = []
    notes: list[str] = []
    paths: list[Path] = []
    own = storage_of(location_of(job.checkpoint.local.dir), job.run.dir)
    try:
        if is_private(own):
            owner = storage.owner_of(own)
            if owner is None or owner.incarnation not in valid:
                raise CheckpointError("it is of another run, or of an earlier incarnation of this one")
            paths = checkpoints_of(own)
    except (CheckpointError, OSError) as error:
        notes.append(f"{own} is not used: {error}")
    for path in paths:
        try:
            if int(path.name[5:]) <= after:
                raise CheckpointError(f"the run has a checkpoint of step {after}")
            files = {name: (file.size, file.sha256) for name, file in read_manifest(path).files.items()}
            content = read_bytes(path / MANIFEST, error=CheckpointError)
            files[MANIFEST] = (len(content), hashlib.sha256(content).hexdigest())
            found.append(_Found(path, files))
        except (CheckpointError, OSError) as error:
            notes.append(f"{path} is not used: {error}")
    return found, notes


def _complete(
    job: Job, valid: Sequence[str], hosts: Hosts, step: int, files: _Files, mine: _Found | None
) -> Path:  # fmt: skip
    """Give this host every file of a checkpoint. Collective. Raises ``CheckpointError`` on all ranks."""
    # Every host hashes its own files first, so that a damaged copy is never the one that is sent.
    good = _verify(hosts, files, mine)
    if lost := sorted(files.keys() - set().union(*good)):
        raise CheckpointError(f"{counted(len(lost), 'file')} lost or damaged on every host, such as {lost[0]}")
    missing = [sorted(files.keys() - each) for each in good]
    with distributed.synchronize_errors():
        need = sum(files[name][0] for name in missing[hosts.of[hosts.rank]])
        own = _make_room(job, valid, step, need, mine) if hosts.leads else None
    folder = distributed.gather_objects(own)[hosts.local[0]]
    assert folder is not None
    transfers = _plan(hosts, files, good, missing)
    if transfers:
        _warn([f"{counted(sum(len(each.files) for each in transfers), 'file')} of step {step} from other hosts"])
    copy_files(folder, transfers)
    with distributed.synchronize_errors(patient=True):
        for name in (name for each in transfers if each.target == hosts.rank for name, _ in each.files):
            if sha256(folder / name) != files[name][1]:
                raise CheckpointError(f"{folder / name} was damaged on its way")
    return folder


def _verify(hosts: Hosts, files: _Files, mine: _Found | None) -> list[set[str]]:
    """Return the undamaged files that each host has; the ranks of a host share the reading."""
    largest_first = sorted(files, key=lambda name: (-files[name][0], name))
    share = largest_first[hosts.local.index(hosts.rank) :: len(hosts.local)]
    sound = []
    with distributed.synchronize_errors(patient=True):
        for name, path in [(name, mine.folder / name) for name in share] if mine else []:
            with suppress(OSError):
                if not path.is_symlink() and path.stat().st_size == files[name][0] and sha256(path) == files[name][1]:
                    sound.append(name)
    by_rank = distributed.gather_objects(sound)
    return [set().union(*(by_rank[rank] for rank in ranks)) for ranks in hosts.ranks]


def _make_room(job: Job, valid: Sequence[str], step: int, need: int, mine: _Found | None) -> Path:
    """Return the folder of the checkpoint on this host, which has room for the ``need`` bytes that it lacks."""
    location = location_of(job.checkpoint.local.dir)
    if need and free_bytes(location) < need:
        raise CheckpointError(f"no room for {need:,} bytes in {location} on this host")
    own = storage_of(location, job.run.dir)
    folder = mine.folder if mine else step_folder(own, step)
    try:
        if need:
            storage.prepare(own, job.run.dir, valid[0], valid[1:])
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    return folder


def _plan(hosts: Hosts, files: _Files, good: Sequence[set[str]], missing: Sequence[Sequence[str]]) -> list[Transfer]:
    """Return who sends which files to whom: from the nearest previous host in the ring, by ranks in turn."""
    routes: dict[tuple[int, int], list[str]] = defaultdict(list)
    holders = {name: [host for host, names in enumerate(good) if name in names] for name in files}
    for target, lacked in enumerate(missing):
        for turn, name in enumerate(lacked):
            source = holders[name][bisect(holders[name], target) - 1]  # before the first host comes the last one
            senders, receivers = hosts.ranks[source], hosts.ranks[target]
            routes[senders[turn % len(senders)], receivers[turn % len(receivers)]].append(name)
    return [
        Transfer(source, target, tuple((name, files[name][0]) for name in names))
        for (source, target), names in sorted(routes.items())
    ]
