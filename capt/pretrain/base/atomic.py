"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import io
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import replacing


def require_new(out: Path) -> None:
    """Refuse what a folder cannot be renamed to when it is done, before hours of work go into it.

    Raises:
        DataError: ``out`` is a link, a mount point, the working folder, a file, or a folder that is not empty.
    """
    if out.is_symlink():
        raise DataError(f"{out} is a link: name the place that it leads to, or another folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists and is not empty: remove it or choose another folder")
    mounted = out.is_dir() and out.absolute().is_mount()
    if mounted or (out.is_dir() and out.samefile(Path.cwd())):
        what = "a mount point" if mounted else "the working folder"
        raise DataError(f"{out} is {what}, which cannot be replaced: name a new folder in it")


def rename_to_new(folder: Path, out: Path) -> None:
    """Rename ``folder`` to ``out``, which `require_new` has checked. Raises ``DataError`` if ``out`` is now taken."""
    try:
        os.replace(folder, out)
    except OSError as problem:
        if problem.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise DataError(f"{out}: another process has written it meanwhile: choose another folder") from problem
        raise
    sync(out.parent)


@contextmanager
def partial_folder(out: Path) -> Iterator[Path]:
    """Make an empty folder beside ``out`` for what will be renamed to it; what is left of the folder is removed.

    It is locked for as long as this process lives. So are those of other processes, and one that is not locked was left
    by a killed one and is removed first. Other hosts, whose locks some file systems do not show here, use other names.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:4]
    for path in out.parent.glob(f".{glob.escape(out.name)}.{host}-*.partial"):
        with suppress(OSError), _locked(path):  # it is locked, or no folder
            shutil.rmtree(path)
    partial = out.parent / f".{out.name}.{host}-{secrets.token_hex(4)}.partial"
    partial.mkdir()
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks: nothing is ever removed there
            stack.enter_context(_locked(partial))
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of this user. Raises ``OSError``: another process does, or it is a link."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user's folder", str(folder))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder beside ``out`` that becomes ``out`` in one rename when the block succeeds.

    When the block raises, the temporary folder is removed and ``out`` is as before. One that a killed process left is
    removed at the next start with the same ``out``. Files are made durable before the rename.

    Args:
        replace: a folder at ``out`` gives way; the caller has checked that it may. A crash in the middle may leave it
            beside ``out``, as ``.<name>.<random>.old``.

    Raises:
        DataError: without ``replace``, ``out`` cannot become a new folder (`require_new`), or another process has made
            it meanwhile.
    """
    if not replace:
        require_new(out)
    try:
        with partial_folder(out) as partial:
            yield partial
            # All that is in it, or a crash after the rename could leave empty files in place.
            for path in partial.rglob("*"):
                sync(path)
            sync(partial)
            if replace:
                _rename_over(partial, out)
            else:
                rename_to_new(partial, out)
    except OSError as error:
        _name_file(error, out)
        raise


def _rename_over(folder: Path, out: Path) -> None:
    # Two renames: a folder cannot be renamed over one that has files.
    old = folder.with_suffix(".old")
    with suppress(FileNotFoundError):
        out.rename(old)
    try:
        folder.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_file(path: Path) -> Iterator[IO[str]]:
    """Yield a UTF-8 text file to write that becomes ``path`` in one rename when the block succeeds."""
    try:
        with replacing(path) as (file, _):
            text = io.TextIOWrapper(file, encoding="utf-8")
            yield text
            text.detach()  # which flushes
    except OSError as error:
        _name_file(error, path)
        raise


def _name_file(error: OSError, path: Path) -> None:
    """Name the file in an error of a write, which names none."""
    if error.filename is None and error.errno is not None:
        error.filename = str(path)


def sync(path: Path) -> None:
    """Make the content of a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
