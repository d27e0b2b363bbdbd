"""Reading lines of text, hashing a file, and writing a file or a folder so that it is there whole or not at all."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from pretrain.base.errors import DataError
from pretrain.base.files import replacing

LONGEST_LINE = 64 << 20
"""Bytes of a line of text at most: a small archive may hold one of terabytes."""


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
            _sync(file)
        _sync(partial)
        os.replace(partial, out)
        _sync(out.parent)
    except OSError as error:
        _name(error, out)
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
        _name(error, path)
        raise


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_lines(files: Iterable[Path], progress: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yield the lines of UTF-8 text files (``.gz`` is unpacked), without their line ends, one file after the other.

    ``progress`` is called now and then with the number of bytes read since the last call, as they lie on disk.

    Raises:
        DataError: a file is missing, not a file, empty, not valid UTF-8, or a damaged gzip file.
    """
    for path in files:
        if not path.is_file():
            raise DataError(
                f"{path}: {'not a file' if path.exists() else 'no such file'}; give UTF-8 text, or .gz of it"
            )
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
        done = 0
        try:
            with path.open("rb") as raw:
                for line in _with_progress(raw, path.suffix == ".gz", progress):
                    yield line.decode("utf-8").rstrip("\r\n")
                    done += 1
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x}"
            raise DataError(f"{path}, line {done + 1}: not UTF-8 text ({byte}); convert it with iconv first") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}, after line {done}: damaged gzip file ({error})") from error


def _with_progress(raw: IO[bytes], packed: bool, progress: Callable[[int], None] | None) -> Iterator[bytes]:
    reported = 0
    with gzip.open(raw) if packed else raw as lines:
        for number, line in enumerate(iter(partial(lines.readline, LONGEST_LINE), b"")):
            if len(line) == LONGEST_LINE:
                raise DataError(
                    f"{raw.name}, line {number + 1}: over {LONGEST_LINE:,} bytes, more than a line may have"
                )
            if progress is not None and number % 1024 == 0:
                progress(raw.tell() - reported)
                reported = raw.tell()
            yield line
        if progress is not None:
            progress(raw.tell() - reported)


def _name(error: OSError, path: Path) -> None:
    """An error of a write names no file: it is the one that was being written."""
    if error.filename is None and error.errno is not None:
        error.filename = str(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
