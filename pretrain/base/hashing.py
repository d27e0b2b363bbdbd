"""SHA-256 of files, compared with what a manifest says about them."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pretrain.base.errors import UserError, user_text
from pretrain.base.files import open_regular

_CHUNK = 1 << 20


def sha256(path: Path) -> str:
    """SHA-256 of a file that this process has written, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """What ``os.stat`` says about a file, as far as it shows a change."""
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
