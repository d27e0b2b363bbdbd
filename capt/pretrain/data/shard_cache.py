"""The files of a set in a store, shards before all, in a bounded cache of this host that its ranks and jobs share.

A shard is fetched by one process of the host (a lock file), compared with the SHA-256 of the set's manifest, and kept
as ``stored/<SHA-256>.bin`` of the cache. A reader holds a shared lock on the shards that it has mapped while it makes a
batch, but not while it waits for room: no two readers wait for what the other one holds. Such shards, and those that
the order of the samples needs next, stay; of the others the one with the farthest next use goes first.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from capt.pretrain.base.cache import require_cache
from capt.pretrain.base.errors import ConfigError, DataError, counted
from capt.pretrain.base.locks import file_lock, is_locked, make_once
from capt.pretrain.base.stores import copy_to, look_up, without_secrets
from capt.pretrain.base.verification import ExpectedFile, Inspection, check_size, hash_file
from capt.pretrain.data.sampler import GroupedSampler

logger = logging.getLogger(__name__)
T = TypeVar("T")

_REMEDY = "; prepare the data again, or restore the file"
_PATIENCE, _PAUSE = 600.0, 0.5
"""Seconds for which room in the cache is waited for, and between two looks."""
_FETCHES = 2
"""Times that a file of the right size and another content is fetched."""


class ShardCache:
    """The files of one shard set at ``url``.

    Args:
        url: the folder of the set in its store.
        shards: the names of the shards in the order of the stream.
        files: the files by name, as the manifest records them.
        inspections: a look at the bytes of each.
        folder: the folder ``stored`` of the cache.
        limit: bytes that this folder may have.
        check: hash what earlier jobs have left before it is used.
        key: what the user has set ``limit`` by.
        remedy: what is done about a file that was changed.
    """

    def __init__(
        self, url: str, shards: list[str], files: dict[str, ExpectedFile], inspections: dict[str, Inspection],
        folder: Path, limit: int, *, check: bool, key: str = "data.cache_bytes", remedy: str = _REMEDY,
    ) -> None:  # fmt: skip
        self.url, self.files, self._inspections = url.rstrip("/"), files, inspections
        self.folder, self.limit, self._check = folder, limit, check
        self._key, self._remedy = key, remedy
        self._began = time.time()
        self._shards = shards
        self._maps: dict[str, tuple[np.ndarray, _Held]] = {}
        self._group: tuple[int, int] | None = None
        self._coming: dict[str, int] = {}
        self._wanted: SimpleQueue[str | None] | None = None
        self._owner = 0

    def fetch_all(self) -> None:
        """Fetch every file, shared among the processes of this host that call this. Raises ``DataError``."""
        # 0: in use, so that no file of the set gives way to another.
        self._coming = dict.fromkeys(self.files, 0)
        for name in _rotated(list(self.files)):
            self.path(name)

    def follow(
        self, order: GroupedSampler, sample: int, shards_of: Callable[[int], Iterable[int]] | None = None
    ) -> None:
        """Use the shards around a sample: those of its group now, and those of the next group are fetched meanwhile.

        ``shards_of`` gives the shards of a block of the order; without it a block is the shard of its number.
        """
        groups = order.groups_from(sample)
        group, now = next(groups)
        if group == self._group:
            return
        _, after = next(groups)
        later = islice(groups, 2 * (-(-order.blocks // order.at_once)))  # every block comes once more
        # File -> turn of its next use: 0 now, 1 in the next group, and so on.
        self._coming = {}
        of = shards_of or (lambda block: (block,))
        for turn, blocks in enumerate([now, after, *(blocks for _, blocks in later)]):
            for shard in chain.from_iterable(map(of, blocks.tolist())):
                self._coming.setdefault(self._shards[shard], turn)
        self._group = group
        # Now in the order of use; of the next group each process begins elsewhere.
        wanted = chain.from_iterable(map(of, [*now.tolist(), *_rotated(after.tolist())]))
        self._prefetch([self._shards[shard] for shard in dict.fromkeys(wanted)])

    def release(self, name: str | None = None) -> None:
        """Let go of a file, or of the shards, that are mapped; a view that is still in use keeps its memory."""
        for each in [each for each in self._maps if each == name or (name is None and each in self._coming)]:
            del self._maps[each]

    def require_room(self, at_once: int | None, beside: int = 0) -> int:
        """The bytes that a job needs in the cache: every file, or with ``at_once`` the shards of two groups.

        Raises ``ConfigError`` where they do not fit into it ``beside`` other bytes.
        """
        largest = max(self.files[name].size for name in self._shards)
        if at_once is None:
            need, remedy = sum(record.size for record in self.files.values()), "set data.shards_at_once for fewer"
        else:
            need, remedy = min(2 * at_once, len(self._shards)) * largest, "lower data.shards_at_once"
        if need + beside > self.limit:
            more = f" and those of training {beside:,}" if beside else ""
            raise ConfigError(
                f"data.cache_bytes {self.limit:,}: the shards of {without_secrets(self.url)} that are used at a time "
                f"have {need:,} bytes{more}; raise it, or {remedy}"
            )
        return need

    def map(self, name: str, dtype: np.dtype[np.generic]) -> np.ndarray:
        """The numbers of a file, fetched if need be. Raises ``DataError``."""
        while name not in self._maps:
            if not self._is_good(self.folder / f"{self.files[name].sha256}.bin", self.files[name]):
                self.release()  # room is waited for
            path = self.path(name)
            with suppress(FileNotFoundError), path.open("rb") as file:  # it may be removed just now
                with suppress(OSError):  # without locks it may be removed, and stays readable
                    fcntl.flock(file, fcntl.LOCK_SH)
                # The lock is of the open file, so the duplicate keeps it after `file` is closed.
                self._maps[name] = np.memmap(file, dtype=dtype, mode="r"), _Held(os.dup(file.fileno()))
        return self._maps[name][0]

    def path(self, name: str) -> Path:
        """The file ``name`` on this host, fetched if need be; where the cache has no room, others are waited for.

        Raises:
            DataError: the store does not give it, or gives other bytes than the manifest says; the disk is full, or the
                cache for ten minutes.
        """
        record = self.files[name]
        path = self.folder / f"{record.sha256}.bin"

        def make() -> None:
            if path.is_file():
                self._recheck(name, path, record)
            if not path.is_file():
                self._fetch(name, path, record)

        make_once(self.folder / f".{record.sha256}.lock", lambda: self._is_good(path, record), make)
        return path

    def _is_good(self, path: Path, record: ExpectedFile) -> bool:
        """Return whether a file was fetched, or checked, since this job began."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        # A file of an earlier job is hashed once in each job; `_recheck` then dates it as of now.
        return status.st_size == record.size and (not self._check or status.st_mtime >= self._began)

    def _recheck(self, name: str, path: Path, record: ExpectedFile) -> None:
        try:
            hash_file(path, check_size(path, record, DataError), record, self._inspections.get(name), DataError, "")
            os.utime(path)
        except DataError as error:
            logger.warning("%s; it is fetched again", error)
            path.unlink()

    def _fetch(self, name: str, path: Path, record: ExpectedFile) -> None:
        url = f"{self.url}/{name}"
        for attempt in range(1, _FETCHES + 1):
            # Room is taken before the first byte, under the lock that all processes of the host share.
            partial = self._room(path, record.size)
            try:
                file = look_up(url)
                if file.size != record.size:  # known before a byte is fetched
                    raise DataError(f"{file} has {file.size:,} bytes, the manifest says {record.size:,}{self._remedy}")
                with partial.open("r+b") as out:
                    digest = copy_to(file, out)
                if digest == record.sha256:
                    hash_file(
                        partial, check_size(partial, record, DataError), record, self._inspections.get(name), DataError,
                        self._remedy,
                    )  # fmt: skip
                    with self._accounts():  # the file counts against the limit from the moment it has its name
                        partial.replace(path)
                    return
            finally:
                partial.unlink(missing_ok=True)
            text = f"{file}: expected SHA-256 {record.sha256}, the store gave {digest}"
            if attempt == _FETCHES:
                raise DataError(f"{text}: it was changed or damaged{self._remedy}")
            logger.warning("%s; it is fetched again", text)

    def _room(self, path: Path, size: int) -> Path:
        """`_make_room`, once other processes are done with what they use: they may be a group of windows behind."""
        if size > self.limit:
            raise DataError(
                f"{self._key} {self.limit:,}: a file of {without_secrets(self.url)} has {size:,} bytes; raise it"
            )
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return self._make_room(path, size)
            except _NoRoomError:
                if time.monotonic() > until:
                    raise
            time.sleep(_PAUSE)

    def _make_room(self, path: Path, size: int) -> Path:
        """Remove what is needed last until ``size`` bytes fit, and take them for a new file beside ``path``."""
        require_cache(self.folder)
        with self._accounts():
            for old in self.folder.glob(".*.partial"):
                if not is_locked(self.folder / f".{old.name[1:65]}.lock"):  # of a process that was killed
                    old.unlink(missing_ok=True)
            files = {}
            for file in self.folder.iterdir():
                with suppress(FileNotFoundError):  # a fetch that has failed just now
                    if file.suffix in (".bin", ".partial"):
                        files[file] = file.stat()
            total = sum(status.st_size for status in files.values()) + size
            # A file that does not come again is needed last, but before those of other sets.
            own = {f"{record.sha256}.bin": self._coming.get(name, 1 << 40) for name, record in self.files.items()}
            # files of other sets by their last use, before those of this set, by their next one
            order = sorted((-own.get(file.name, 1 << 50), status.st_mtime, file) for file, status in files.items())
            for next_use, _, file in order:
                # Turns 0 and 1: the group in use and the next one stay.
                if total <= self.limit or next_use >= -1:
                    break
                if file.suffix == ".bin" and _remove_unused(file):
                    total -= files[file].st_size
            if total > self.limit:
                raise _NoRoomError(
                    f"{self._key} {self.limit:,}: {self.folder} has no room for {counted(size, 'byte')}, jobs use "
                    f"what is in it; raise it{', or lower data.shards_at_once' if self._shards else ''}"
                )
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            try:
                with partial.open("wb") as file_out:
                    # Reserve the bytes first: two fetches must not count on the same room.
                    os.posix_fallocate(file_out.fileno(), 0, size)
            except OSError as error:
                partial.unlink(missing_ok=True)
                raise DataError(f"{self.folder}: no room for {counted(size, 'byte')} ({error.strerror})") from error
            return partial

    def _accounts(self) -> AbstractContextManager[None]:
        """The lock under which files are counted, made room for and named."""
        return file_lock(self.folder / ".room.lock", wait=None, error=DataError)

    def _prefetch(self, names: Iterable[str]) -> None:
        if self._wanted is None or self._owner != os.getpid():  # threads do not survive a fork
            wanted: SimpleQueue[str | None] = SimpleQueue()
            self._wanted, self._owner = wanted, os.getpid()
            weakref.finalize(self, wanted.put, None)  # which ends the thread
            threading.Thread(target=_fetch_wanted, args=(weakref.ref(self), wanted), daemon=True).start()
        for name in names:
            self._wanted.put(name)

    def is_coming(self, name: str) -> bool:
        """Return whether a file is of the group in use, or of the next."""
        return self._coming.get(name, 2) <= 1


class _Held:
    """A descriptor that holds the lock of a file until it is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


class _NoRoomError(DataError):
    """The cache is full of what is in use."""


def _rotated(values: list[T]) -> list[T]:
    """The values from another one on in each process, so that the processes of a host share the work."""
    start = os.getpid() % max(1, len(values))
    return [*values[start:], *values[:start]]


def _fetch_wanted(owner: weakref.ref[ShardCache], wanted: SimpleQueue[str | None]) -> None:
    """Fetch what is wanted until the cache is no longer used."""
    # A weak reference: the thread must not keep the cache alive.
    while (name := wanted.get()) is not None and (cache := owner()) is not None:
        try:
            if cache.is_coming(name):
                cache.path(name)
        except (DataError, OSError) as error:  # the reader meets it, and says so
            logger.warning("could not fetch ahead: %s", error)
        # While the thread waits it holds no reference.
        del cache


def _remove_unused(path: Path) -> bool:
    """Remove a file of the cache unless a process has it mapped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
