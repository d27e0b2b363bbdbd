"""Find the newest local checkpoint over all hosts, and copy its files to the hosts that lack them, rank to rank."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, counted
from capt.pretrain.base.files import open_regular, read_bytes
from capt.pretrain.base.process import boot_id
from capt.pretrain.base.verification import sha256
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.checkpoint import read_manifest
from capt.pretrain.engine.durable import write_error
from capt.pretrain.engine.step_folders import MANIFEST, checkpoints_of, step_folder, step_of
from capt.pretrain.reliability.local import storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, as a ring in the order of their first ranks: the ranks of each, and this process's rank."""

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @cached_property
    def of(self) -> dict[int, int]:
        """The number of each rank's host."""
        return {rank: number for number, ranks in enumerate(self.ranks) for rank in ranks}

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host. The first one makes and removes folders."""
        return self.ranks[self.of[self.rank]]

    @property
    def leads(self) -> bool:
        """True if this process is the first rank of its host."""
        return self.rank == self.local[0]

    def peer(self, rank: int) -> int | None:
        """Return the rank on the next host that keeps the replica of ``rank``; None where there is one host only."""
        if len(self.ranks) == 1:
            return None
        own = self.of[rank]
        there = self.ranks[(own + 1) % len(self.ranks)]
        return there[self.ranks[own].index(rank) % len(there)]

    def held(self, sizes: Sequence[int]) -> int:
        """Return the bytes on this host, replicas included, where the files of each rank have ``sizes`` bytes."""
        places = ((size, each) for rank, size in enumerate(sizes) for each in (rank, self.peer(rank)))
        return sum(size for size, each in places if each in self.local)


def find_hosts() -> Hosts:
    """Ask all ranks on which host they are. Collective."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, (name, boot) in enumerate(distributed.gather_objects(_this_host())):
        ranks.setdefault((name, boot), []).append(rank)
    return Hosts(tuple(map(tuple, ranks.values())), distributed.rank())


def _this_host() -> tuple[str, str]:
    """Return the host's name and the id of its boot: containers may all have the same name."""
    return socket.gethostname(), boot_id()


_Files = Mapping[str, tuple[int, str]]
"""Size and SHA-256 of each file of a checkpoint, its manifest included."""


class _Found(NamedTuple):
    """A checkpoint of which this host has files: its folder, and all files that its manifest lists."""

    folder: Path
    files: _Files

    @property
    def key(self) -> tuple[int, str]:
        """The step and the digest of the manifest, which are the same on all hosts."""
        return step_of(self.folder), self.files[MANIFEST][1]


def newest_local(job: Job, after: int) -> Path | None:
    """Return this host's folder of the newest local checkpoint beyond step ``after``, verified. Collective.

    A file that this host lacks comes from a host that has it. None where no checkpoint is newer and complete; a line
    says what is not used (another incarnation, a file lost or damaged on every host, no room).
    """
    valid = distributed.broadcast_object(storage.incarnations_of(job.run.dir))
    if not valid:
        if (record := job.run.dir / storage.INCARNATION).exists():
            _warn(f"{record} cannot be read: the run's local checkpoints are not used")
        return None
    hosts = find_hosts()
    # Each host's first rank tells what its host has.
    found, notes = _find(job, valid, after)
    answers = distributed.gather_objects(([each.key for each in found], notes) if hosts.leads else ([], []))
    holders: dict[tuple[int, str], int] = {}
    for rank, (keys, said) in enumerate(answers):
        for note in said:
            _warn(f"host of rank {rank}: {note}" if len(hosts.ranks) > 1 else note)
        for step, digest in keys:
            # The first host that has it tells all others which files belong to it.
            holders.setdefault((step, digest), rank)
    # From the newest on: all ranks pass over one that cannot be completed.
    for key in sorted(holders, reverse=True):
        mine = next((each for each in found if each.key == key), None)
        files = distributed.broadcast_object(mine.files if mine else {}, src=holders[key])
        try:
            return _complete(job, valid, hosts, key[0], files, mine)
        except CheckpointError as error:
            _warn(f"the local checkpoint of step {key[0]} is not used: {error}")
    return None


def _warn(note: str) -> None:
    if distributed.rank() == 0:
        logger.warning("%s", note)


def _find(job: Job, valid: Sequence[str], after: int) -> tuple[list[_Found], list[str]]:
    """Return the checkpoints of the run on this host, and notes about what cannot be used."""
    found: list[_Found] = []
    notes: list[str] = []
    paths: list[Path] = []
    own = storage.storage_of(job.checkpoint.local.dir, job.run.dir)
    try:
        if storage.is_private(own):
            owner = storage.owner_of(own)
            if owner is None or owner.incarnation not in valid:
                raise CheckpointError("it belongs to another run, or to an earlier incarnation of this one")
            paths = checkpoints_of(own)
    except (CheckpointError, OSError) as error:
        notes.append(f"{own} is not used: {error}")
    for path in paths:
        try:
            if step_of(path) <= after:
                raise CheckpointError(f"the run has a checkpoint of step {after}")
            files = {name: (file.size, file.sha256) for name, file in read_manifest(path).files.items()}
            # The manifest is copied like the files that it lists, and its digest names the checkpoint.
            content = read_bytes(path / MANIFEST, error=CheckpointError)
            files[MANIFEST] = (len(content), hashlib.sha256(content).hexdigest())
            found.append(_Found(path, files))
        except (CheckpointError, OSError) as error:
            notes.append(f"{path} is not used: {error}")
    return found, notes


def _complete(job: Job, valid: Sequence[str], hosts: Hosts, step: int, files: _Files, mine: _Found | None) -> Path:
    """Give this host every file of a checkpoint. Collective. Raises ``CheckpointError`` on all ranks."""
    # Every host hashes its own files first, so that a damaged copy is never the one that is sent.
    good = _verify(hosts, files, mine)
    if lost := sorted(files.keys() - set().union(*good)):
        raise CheckpointError(f"{counted(len(lost), 'file')} lost or damaged on every host, such as {lost[0]}")
    missing = [sorted(files.keys() - each) for each in good]
    folder = mine.folder if mine else step_folder(storage.storage_of(job.checkpoint.local.dir, job.run.dir), step)
    need = sum(files[name][0] for name in missing[hosts.of[hosts.rank]])
    with distributed.synchronize_errors():
        if need and hosts.leads:
            _make_room(folder, need, job.run.dir, valid)
    transfers = _plan(hosts, files, good, missing)
    if transfers:
        _warn(f"{counted(sum(len(each.files) for each in transfers), 'file')} of step {step} from other hosts")
    copy_files(folder, transfers)
    with distributed.synchronize_errors(patient=True):
        for name in (name for each in transfers if each.target == hosts.rank for name, _ in each.files):
            if sha256(folder / name) != files[name][1]:
                raise CheckpointError(f"{folder / name} was damaged on its way")
    return folder


def _verify(hosts: Hosts, files: _Files, mine: _Found | None) -> list[set[str]]:
    """Return the undamaged files that each host has; the ranks of a host share the reading."""
    # Every n-th of the files by size: about equal shares of bytes.
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


def _make_room(folder: Path, need: int, run: Path, valid: Sequence[str]) -> None:
    """Make the folder of a checkpoint on this host, if there is room for the ``need`` bytes that it lacks."""
    own = folder.parents[1]
    if storage.free_bytes(own.parent) < need:
        raise CheckpointError(f"no room for {need:,} bytes in {own.parent} on this host")
    try:
        storage.prepare(own, run, valid[0], valid[1:])
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error


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


CHUNK = 8 << 20
"""Largest number of bytes of a file that two ranks exchange in one turn."""
BUFFERS = 64 << 20
"""Largest number of bytes that a rank exchanges with all others in one turn: some of a thousand ranks have hundreds."""


class Transfer(NamedTuple):
    """Files (name, bytes) that ``source`` sends to ``target``; one transfer for each pair of ranks."""

    source: int
    target: int
    files: tuple[tuple[str, int], ...]


class _Chunk(NamedTuple):
    name: str
    start: int
    size: int
    last: bool


def chunk_size(transfers: Sequence[Transfer]) -> int:
    """Return the bytes of a file that two ranks exchange in one turn; the same for all ``transfers``."""
    partners = Counter(rank for each in transfers for rank in (each.source, each.target))
    return min(CHUNK, max(1, BUFFERS // max(partners.values(), default=1)))


def copy_files(folder: Path, transfers: Sequence[Transfer]) -> None:
    """Carry out all transfers side by side, from a rank's ``folder`` to another rank's. Collective.

    All ranks know the chunks of every transfer, so they exchange one chunk of each per turn without asking. A file
    appears under its name when it is complete. After an error a rank sends zeros, so that no other rank waits for it.

    Raises:
        CheckpointError: a rank could not read or write, on all ranks.
    """
    rank, size = distributed.rank(), chunk_size(transfers)
    own = [each for each in transfers if rank in (each.source, each.target)]
    errors: list[OSError] = []
    for turn in zip_longest(*(_chunks(each, size) for each in own)):
        chunks = [(each, chunk) for each, chunk in zip(own, turn, strict=True) if chunk is not None]
        outgoing = [(each.target, _read(folder, chunk, errors)) for each, chunk in chunks if each.source == rank]
        expected = [(each.source, chunk) for each, chunk in chunks if each.target == rank]
        incoming = [(source, torch.zeros(max(1, chunk.size), dtype=torch.uint8)) for source, chunk in expected]
        distributed.exchange(outgoing, incoming)
        for (_, chunk), (_, content) in zip(expected, incoming, strict=True):
            _write(folder, chunk, content, errors)
    with distributed.synchronize_errors():
        if errors:
            raise write_error(folder, errors[0]) from errors[0]


def _chunks(transfer: Transfer, size: int) -> Iterator[_Chunk]:
    for name, total in transfer.files:
        for start in range(0, max(total, 1), size):  # an empty file is a chunk, too
            yield _Chunk(name, start, min(size, total - start), last=start + size >= total)


def _read(folder: Path, chunk: _Chunk, errors: list[OSError]) -> Tensor:
    content = torch.zeros(max(1, chunk.size), dtype=torch.uint8)
    try:
        with open_regular(folder / chunk.name, error=CheckpointError) as file:
            file.seek(chunk.start)
            if not errors and file.readinto(content.numpy()[: chunk.size].data) != chunk.size:
                raise OSError(f"{folder / chunk.name} is shorter than it was")
    except OSError as error:
        errors.append(error)
    return content


def _write(folder: Path, chunk: _Chunk, content: Tensor, errors: list[OSError]) -> None:
    path = folder / chunk.name
    partial = path.with_name(f".{path.name}.partial")
    if errors:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The first chunk begins anew, whatever a killed copy has left.
        with partial.open("ab" if chunk.start else "wb") as file:
            file.write(content.numpy()[: chunk.size].data)
        if chunk.last:
            os.replace(partial, path)
    except OSError as error:
        errors.append(error)
