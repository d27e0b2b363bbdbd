"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pretrain.base.errors import DataError
from pretrain.base.files import replacing


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside ``out`` that becomes ``out`` in one rename when the block succeeds.

    When the block raises, the temporary folder is removed and ``out`` is as before.

    Raises:
        DataError: ``out`` exists and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists and is not empty: remove it or choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        os.replace(partial, out)
        sync(out.parent)
    except OSError as error:
        _name_file(error, out)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
