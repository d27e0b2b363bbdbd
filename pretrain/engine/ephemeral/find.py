"""Finds the newest ephemeral checkpoint that is whole, all hosts together, and gives every host all of it."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.base import distributed
from pretrain.base.errors import CheckpointError, counted
from pretrain.base.files import read_bytes
from pretrain.base.hashing import sha256
from pretrain.config.schema import Job
from pretrain.engine.checkpoint.layout import checkpoints_of, step_folder
from pretrain.engine.checkpoint.manifest import MANIFEST, read_manifest
from pretrain.engine.ephemeral.hosts import Hosts, find_hosts
from pretrain.engine.ephemeral.places import LIFE, adopt, claim, folder_of, is_private, lives_of, owner_of, places, room
from pretrain.engine.ephemeral.transfer import Move, move_files

logger = logging.getLogger(__name__)

_Files = Mapping[str, tuple[int, str]]
"""Size and SHA-256 of each file of a checkpoint, its manifest included."""


@dataclass(frozen=True)
class _Held:
    """A checkpoint of which this host has files: the folder, all its files, and those that are here."""

    folder: Path
    step: int
    files: _Files
    here: tuple[str, ...]

    @property
    def key(self) -> tuple[int, str]:
        """What the same checkpoint has on all hosts: its step, and the digest of its manifest."""
        return self.step, self.files[MANIFEST][1]


def newest_ephemeral(job: Job, after: int) -> Path | None:
    """Return this host's folder of the newest ephemeral checkpoint of a step beyond ``after``, verified. Collective.

    A file that this host lacks comes from a host that has it. None where no checkpoint is newer and whole; what is
    passed over (another life of the run, a file lost or damaged everywhere, no room) is said in a line.
    """
    lives = distributed.broadcast_object(lives_of(job.run.dir))
    if not lives:
        if (job.run.dir / LIFE).exists():
            _tell([f"{job.run.dir / LIFE} cannot be read: what hosts have of the run in memory is not used"])
        return None
    hosts = find_hosts()
    with distributed.synchronize_errors():
        if hosts.leads:
            adopt(places(job.checkpoint.ephemeral.dir), job.run.dir, lives)
    held, notes = _look(job, lives, after)
    answers = distributed.gather_objects(
        ([each.key for each in held], notes) if hosts.leads else ([], [])  # the ranks of a host see the same
    )
    holders: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, (keys, said) in enumerate(answers):
        _tell(f"host of rank {rank}: {note}" if len(hosts.ranks) > 1 else note for note in said)
        for step, digest in keys:
            holders[step, digest].append(rank)
    for key in sorted(holders, reverse=True):
        mine = next((each for each in held if each.key == key), None)
        files = distributed.broadcast_object(mine.files if mine else {}, src=holders[key][0])
        try:
            return _gather(job, lives, hosts, key[0], files, mine)
        except CheckpointError as error:
            _tell([f"the ephemeral checkpoint of step {key[0]} is not used: {error}"])
    return None


def _tell(notes: Iterable[str]) -> None:
    if distributed.rank() == 0:
        for note in notes:
            logger.warning("%s", note)


def _look(job: Job, lives: Sequence[str], after: int) -> tuple[list[_Held], list[str]]:
    """What this host has of the run, and what it has but cannot use."""
    held: list[_Held] = []
    notes: list[str] = []
    for place in places(job.checkpoint.ephemeral.dir):
        folder = folder_of(place, job.run.dir)
        try:
            if not is_private(folder):
                continue
            owner = owner_of(folder)
            if owner is None or owner.life not in lives:
                notes.append(f"{folder} is not used: it is of another run, or of an earlier life of this one")
                continue
        except (CheckpointError, OSError) as error:
            notes.append(f"{folder} is not used: {error}")
            continue
        for path in checkpoints_of(folder):
            if int(path.name[5:]) <= after:
                notes.append(f"{path} is not used: the run has a checkpoint of step {after}")
                continue
            try:
                held.append(_describe(path))
            except (CheckpointError, OSError) as error:
                notes.append(f"{path} is not used: {error}")
    return held, notes


def _describe(path: Path) -> _Held:
    manifest = read_manifest(path)
    files = {name: (file.size, file.sha256) for name, file in manifest.files.items()}
    content = read_bytes(path / MANIFEST, error=CheckpointError)
    files[MANIFEST] = (len(content), hashlib.sha256(content).hexdigest())
    here = tuple(name for name, (size, _) in sorted(files.items()) if _has(path / name, size))
    return _Held(path, manifest.progress.step, files, here)


def _has(path: Path, size: int) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == size


def _gather(job: Job, lives: Sequence[str], hosts: Hosts, step: int, files: _Files, mine: _Held | None) -> Path:
    """Give this host every file of a checkpoint. Collective. Raises ``CheckpointError`` on all ranks."""
    good = _verify(hosts, files, mine)
    everywhere = set().union(*good)
    if lost := sorted(files.keys() - everywhere):
        raise CheckpointError(f"{counted(len(lost), 'file')} lost or damaged on every host, such as {lost[0]}")
    lacking = [sorted(files.keys() - each) for each in good]
    with distributed.synchronize_errors():
        own: Path | None = None
        if hosts.leads:
            own = mine.folder if mine else _new_folder(job, step, files)
            if lacking[hosts.mine]:
                _prepare(job, lives, own, sum(files[name][0] for name in lacking[hosts.mine]))
    folder = distributed.gather_objects(own)[hosts.leader]
    assert folder is not None
    moves = _moves(hosts, files, good, lacking)
    if moves:
        _tell([f"{counted(sum(len(m.files) for m in moves), 'file')} of step {step} from other hosts"])
    move_files(folder, moves)
    received = [name for move in moves if move.target == hosts.rank for name, _ in move.files]
    with distributed.synchronize_errors(patient=True):
        for name in received:
            if sha256(folder / name) != files[name][1]:
                raise CheckpointError(f"{folder / name} was damaged on its way")
    return folder


def _verify(hosts: Hosts, files: _Files, mine: _Held | None) -> list[set[str]]:
    """The files that each host has, whole and with the right digest; the ranks of a host share the reading."""
    here = mine.here if mine else ()
    largest_first = sorted(here, key=lambda name: (-files[name][0], name))
    share = largest_first[hosts.local.index(hosts.rank) :: len(hosts.local)]
    found = []
    with distributed.synchronize_errors(patient=True):
        for name in share:
            assert mine is not None
            try:
                if sha256(mine.folder / name) == files[name][1]:
                    found.append(name)
            except OSError:
                continue
    by_rank = distributed.gather_objects(found)
    return [set().union(*(by_rank[rank] for rank in ranks)) for ranks in hosts.ranks]


def _new_folder(job: Job, step: int, files: _Files) -> Path:
    """Where this host, which has nothing of a checkpoint, will have it."""
    need = sum(size for size, _ in files.values())
    for place in places(job.checkpoint.ephemeral.dir):
        if room(place) >= need:
            return step_folder(folder_of(place, job.run.dir), step)
    raise CheckpointError(f"no room for {need:,} bytes on this host")


def _prepare(job: Job, lives: Sequence[str], folder: Path, need: int) -> None:
    root = folder.parent.parent
    if room(root.parent) < need:
        raise CheckpointError(f"{root.parent}: no room for {need:,} bytes")
    try:
        claim(root, job.run.dir, lives[0], lives[1:])
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error


def _moves(hosts: Hosts, files: _Files, good: Sequence[set[str]], lacking: Sequence[Sequence[str]]) -> list[Move]:
    """Who sends what to whom: the nearest host behind in the ring that has it, and ranks in turn."""
    routes: dict[tuple[int, int], list[str]] = defaultdict(list)
    turns: Counter[int] = Counter()
    holders: dict[str, list[int]] = defaultdict(list)
    for host, names in enumerate(good):
        for name in names:
            holders[name].append(host)
    for target, lacked in enumerate(lacking):
        for name in lacked:
            source = holders[name][bisect(holders[name], target) - 1]  # before the first host comes the last one
            turn = turns[target] = turns[target] + 1
            ranks = hosts.ranks[source], hosts.ranks[target]
            routes[ranks[0][turn % len(ranks[0])], ranks[1][turn % len(ranks[1])]].append(name)
    return [
        Move(source, target, tuple((name, files[name][0]) for name in names))
        for (source, target), names in sorted(routes.items())
    ]
