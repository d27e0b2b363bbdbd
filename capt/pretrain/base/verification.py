"""Verification of files by their records: each byte is hashed once over all ranks, and not again while it is the same.

What was hashed on this host is remembered in a private file in the cache: of every file its device, inode, size, times
of modification and change, and SHA-256. A file of which all these are as remembered is taken for unchanged, so a start
with known files reads none of them. The time of change (ctime) is set by the kernel at every write, and nobody but root
can set it back; what it cannot show is a disk that loses bits by itself. So files are read again after thirty days, and
checkpoints whenever they are loaded (``again=True`` reads everything).

A damaged, foreign or missing memory only means hashing again.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import logging
import os
import re
import socket
import stat
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import DataError, UserError, counted, user_text
from capt.pretrain.base.files import SMALL, is_utf8, open_regular, write_text

# SHA-256 of files, compared with what a manifest says about them.


_CHUNK = 1 << 20


def sha256(path: Path) -> str:
    """SHA-256 of a file that this process has written, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(content: Any) -> str:
    """32 hexadecimal digits that represent a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ExpectedFile:
    """The size in bytes and the SHA-256 that a manifest gives for a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Inspection:
    """A look at the bytes of a file while they are hashed.

    ``name`` represents what is looked for: a file counts as verified only if it was inspected under the same name.
    ``start`` gives a function that is called with each chunk in turn, and with an empty one at the end, and raises a
    `UserError` that says what is wrong.
    """

    name: str
    start: Callable[[], Callable[[memoryview], None]]


class FileState(NamedTuple):
    """A file as the file system describes it; the times are in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def check_size(path: Path, record: ExpectedFile | None, error: type[UserError], hint: str = "") -> FileState:
    """The state of a regular file of the size that its record says. Raises ``error``."""
    try:
        status = path.stat()
    except FileNotFoundError:
        expected = f": {record.size} bytes are expected" if record is not None else ""
        raise error(f"{path} is missing{expected}{hint}") from None
    except OSError as problem:
        raise error(user_text(problem) or f"{path}: {problem.strerror}") from problem
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path} is not a regular file{hint}")
    if record is not None and status.st_size != record.size:
        raise error(f"{path} is damaged: expected {record.size} bytes, found {status.st_size}{hint}")
    return file_state(status)


def hash_file(
    path: Path,
    state: FileState,
    record: ExpectedFile | None,
    look: Inspection | None,
    error: type[UserError],
    hint: str,
) -> str:
    """Read a file once: its SHA-256, compared with the record, and its inspection."""
    digest = hashlib.sha256()
    inspect = _inspector(look, path, error, hint)
    chunk = memoryview(bytearray(_CHUNK))
    with open_regular(path, error=error) as file:
        left = state.size
        while left >= 0 and (count := file.readinto(chunk)):
            left -= count  # one that grows without end is not followed
            digest.update(chunk[:count])
            inspect(chunk[:count])
        if file_state(os.fstat(file.fileno())) != state:
            raise error(f"{path} changed while it was read: see to it that nothing writes it, and start again")
    found = digest.hexdigest()
    if record is not None and found != record.sha256:
        raise error(f"{path} is damaged: expected SHA-256 {record.sha256}, found {found}{hint}")
    inspect(chunk[:0])
    return found


def _inspector(look: Inspection | None, path: Path, error: type[UserError], hint: str) -> Callable[[memoryview], None]:
    if look is None:
        return lambda chunk: None
    inspect = look.start()
    found: list[str] = []

    def at_the_end(chunk: memoryview) -> None:  # that a file is not the recorded one says more
        try:
            if not found:
                inspect(chunk)
        except UserError as problem:
            found.append(str(problem))
        if found and not chunk:
            raise error(f"{path} is damaged: {found[0]}{hint}")

    return at_the_end


def file_state(status: os.stat_result) -> FileState:
    """The fields of ``os.stat`` that show a change of a file."""
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


# The private file in which a host remembers what it has verified.


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
    """Add files to the memory as it is on disk now. If two processes add at the same time, one addition may be lost.

    A path that is not UTF-8 is left out, for JSON cannot hold it: such files are hashed again.
    """
    entries = {seen.path: seen for seen in read_verified(path)}
    for seen in (seen for seen in new if is_utf8(seen.path)):
        entries.pop(seen.path, None)
        entries[seen.path] = seen._replace(at=int(time.time()))
    newest = list(entries.values())[-REMEMBERED:]
    with suppress(OSError):  # a cache that cannot be written costs time, not the job
        write_text(path, _MEMORY.dump_json(newest).decode(), private=True)


_OPENING = 1 << 16
"""Bytes that could be read in the time that it takes to open a file: empty files are work, too."""
_LEAST_AGE = 1.0
"""Seconds since a file's last change before it is remembered: within a tick of the clock a change would not show."""


@dataclass(frozen=True)
class Ranks:
    """The processes that verify together: this one's number, and how they exchange values and verdicts.

    ``gather`` gives every rank's value to every rank, in rank order, and ``broadcast`` rank 0's to every rank. A block
    under ``synchronize_errors`` that fails on one rank fails on all. The default is a process alone.
    """

    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    synchronize_errors: Callable[[], AbstractContextManager[None]] = nullcontext
    broadcast: Callable[[Any], Any] = lambda value: value


ALONE = Ranks()


def all_ranks() -> Ranks:
    """The ranks of the process group; this process alone without one."""
    from capt.pretrain.base import distributed  # imports torch, which a login node does without

    agreed = partial(distributed.synchronize_errors, patient=True)
    return Ranks(distributed.rank(), distributed.gather_objects, agreed, distributed.broadcast_object)


@dataclass
class Verifier:
    """Hashes files, dividing them over ``ranks``; every method is called by all of them alike.

    Args:
        cache: folder of the host's memory.
        ranks: who shares the work. Ranks that see other files under the same names (copies on each host) each have
            theirs read by a rank that sees them.
        again: read every file, whatever is remembered (but once in the life of this object).
    """

    cache: Path = field(default_factory=default_cache)
    ranks: Ranks = ALONE
    again: bool = False
    _known: dict[str, VerifiedFile] = field(default_factory=dict)
    _unsaved: list[VerifiedFile] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.again:
            self._known.update((seen.path, seen) for seen in read_verified(self._memory))

    @property
    def _memory(self) -> Path:
        host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:100]
        return self.cache / f"verified-{os.geteuid()}-{host}.json"

    def digests(self, paths: Sequence[Path]) -> list[str]:
        """The SHA-256 of each file, in hexadecimal; where ranks see other files, of those that this rank sees.

        Raises:
            DataError: on all ranks: a file cannot be read, or changes while it is read.
        """
        return self._digests(paths, [None] * len(paths), [None] * len(paths), DataError, "")

    def verify(
        self, folder: Path, files: Mapping[str, ExpectedFile], *, error: type[UserError] = DataError, hint: str = "",
        inspections: Mapping[str, Inspection] | None = None,
    ) -> None:  # fmt: skip
        """Compare files of ``folder`` (by name) with their records.

        Raises:
            UserError: of the class ``error``, on all ranks: a file is missing or not a file, has another size or
                content, or fails its inspection. ``hint`` is the end of the message.
        """
        paths = [folder / name for name in files]
        looks = [(inspections or {}).get(name) for name in files]
        self._digests(paths, list(files.values()), looks, error, hint)

    def trust(self, path: Path, sha256: str, inspection: str = "") -> None:
        """Remember a file that this process has just written, without reading it."""
        seen = VerifiedFile(_name(path), file_state(path.stat()), sha256, inspection)
        self._known[seen.path] = seen
        self._unsaved.append(seen)

    def _digests(
        self, paths: Sequence[Path], records: Sequence[ExpectedFile | None], looks: Sequence[Inspection | None],
        error: type[UserError], hint: str,
    ) -> list[str]:  # fmt: skip
        # Sizes and times first, for which no byte is read.
        with self.ranks.synchronize_errors(), _system_errors_as(error):
            states = [check_size(path, record, error, hint) for path, record in zip(paths, records, strict=True)]
        known = [self._recall(*each) for each in zip(paths, states, records, looks, strict=True)]
        # what ranks of different hosts can compare: a file's device is numbered by the host
        view = hashlib.sha256(repr([state[1:] for state in states]).encode()).digest()
        have = zlib.compress(bytes(k is not None for k in known), 1)  # of a million files, mostly all or none: 1 KB
        hosts, views, packed = zip(*self.ranks.gather((socket.gethostname(), view, have)), strict=True)
        # Only ranks that see the same files share the reading of them.
        group = [rank for rank, seen in enumerate(views) if seen == view]
        unpacked = {each: zlib.decompress(each) for each in {packed[rank] for rank in group}}
        mine = _divide(
            [state.size for state in states],
            _spread(group, hosts),
            {rank: unpacked[packed[rank]] for rank in group},
        )[self.ranks.rank]
        todo = [i for i in mine if known[i] is None]
        if todo:
            size = counted(sum(states[i].size for i in todo), "byte")
            logger.info("hashing %s, %s", counted(len(todo), "file"), size)
        with self.ranks.synchronize_errors(), _system_errors_as(error):
            for i in todo:
                known[i] = hash_file(paths[i], states[i], records[i], looks[i], error, hint)
        found = [digest or (record.sha256 if record else None) for digest, record in zip(known, records, strict=True)]
        if None in records:  # else the verdict says all: what was found is what the record holds
            hashed = [(i, bytes.fromhex(digest)) for i in mine if (digest := known[i]) is not None]
            for rank, part in enumerate(self.ranks.gather(hashed)):
                if views[rank] == view:
                    for i, digest_of_rank in part:
                        found[i] = digest_of_rank.hex()
        digests = [digest for digest in found if digest is not None]
        assert len(digests) == len(paths), "every file has a rank that has read it"
        self._remember(
            [
                VerifiedFile(_name(path), state, digest, look.name if look else "")
                for path, state, digest, look in zip(paths, states, digests, looks, strict=True)
            ],
            # The first rank of each host writes the memory of that host.
            save=hosts.index(socket.gethostname()) == self.ranks.rank,
        )
        return digests

    def _recall(self, path: Path, state: FileState, record: ExpectedFile | None, look: Inspection | None) -> str | None:
        seen = self._known.get(_name(path))
        if seen is None or seen.state != state or (record is not None and record.sha256 != seen.sha256):
            return None
        return seen.sha256 if look is None or look.name == seen.inspection else None

    def _remember(self, files: Sequence[VerifiedFile], *, save: bool) -> None:
        for seen in files:
            before = self._known.get(seen.path)
            if before is None or before[:3] != seen[:3] or seen.inspection not in ("", before.inspection):
                self._known[seen.path] = seen
                self._unsaved.append(seen)
        settled = [each for each in self._unsaved if time.time() - each.state.changed / 1e9 > _LEAST_AGE]
        self._unsaved = []
        if save and settled:
            write_verified(self._memory, settled)


def _spread(group: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """Ranks in the order in which they get work: the first of each host, then the second of each."""
    count: Counter[str] = Counter()
    turns = []
    for rank in group:
        turns.append((count[hosts[rank]], rank))
        count[hosts[rank]] += 1
    return [rank for _, rank in sorted(turns)]


def _divide(sizes: Sequence[int], ranks: Sequence[int], have: Mapping[int, bytes]) -> dict[int, list[int]]:
    """Divide files over the ranks that answer for them. Files that all ranks know need no answer; those that some know
    are answered for by these in turn; of the rest, the largest goes to the least loaded."""
    shares: dict[int, list[int]] = {rank: [] for rank in ranks}
    knowing: dict[bytes, list[int]] = {}  # what is known differs by host, not by rank
    for rank in ranks:
        knowing.setdefault(have[rank], []).append(rank)
    turns = [(known, itertools.cycle(those)) for known, those in knowing.items()]
    loads = [(0, place) for place in range(len(ranks))]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        tellers = [turn for known, turn in turns if known[i]]
        if len(tellers) == len(turns):
            continue
        if tellers:
            owner = next(tellers[0])
        else:
            load, place = loads[0]
            heapq.heapreplace(loads, (load + sizes[i] + _OPENING, place))
            owner = ranks[place]
        shares[owner].append(i)
    return shares


def _name(path: Path) -> str:
    return os.path.abspath(path)


@contextmanager
def _system_errors_as(error: type[UserError]) -> Iterator[None]:
    """An error of the system that the user can set right, as one line."""
    try:
        yield
    except OSError as problem:
        text = user_text(problem)
        if text is None:
            raise
        raise error(text) from problem
