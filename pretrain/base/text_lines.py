"""Lines of UTF-8 text files, also of packed ones."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from pretrain.base.errors import DataError
from pretrain.base.files import open_regular

LONGEST_LINE = 64 << 20
"""Bytes of a line of text at most: a small archive may hold a line of terabytes."""


_ALWAYS = 64 << 20
_RATIO = 200
"""Bytes that a packed file may hold in any case, and for each of its own: text is packed to a third or a tenth."""


def require_ratio(path: Path, unpacked: int, packed: int) -> None:
    """Refuse a file that unpacks to far more than text does, before hours go into it. Raises ``DataError``."""
    if unpacked > _ALWAYS + _RATIO * packed:
        raise DataError(
            f"{path}: {packed:,} bytes hold over {unpacked:,} bytes of text, more than {_RATIO} times their size; if "
            "that is right, unpack the file and name the result"
        )


class _Unpacked(io.RawIOBase):
    """What a gzip file holds, as long as it is not far more than its bytes so far can be of text."""

    def __init__(self, raw: IO[bytes], path: Path) -> None:
        self._raw, self._path, self._count = raw, path, 0
        self._file = gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._count += count
        require_ratio(self._path, self._count, self._raw.tell())
        return count


def unpacked(raw: IO[bytes], path: Path) -> io.BufferedReader:
    """The content of the gzip file ``path``, which is open as ``raw``.

    Reading raises ``DataError`` where a small file holds gigabytes, and what `gzip` raises for a damaged one.
    """
    return io.BufferedReader(_Unpacked(raw, path))


def read_lines(files: Iterable[Path], progress: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yield the lines of UTF-8 text files (``.gz`` is unpacked), without their line ends, one file after the other.

    A byte order mark at the start of a line is no part of it: joined files have one wherever a file began.
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
            with open_regular(path) as raw:
                for line in _with_progress(raw, path, progress):
                    yield line.decode("utf-8-sig").rstrip("\r\n")
                    done += 1
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x}"
            raise DataError(f"{path}, line {done + 1}: not UTF-8 text ({byte}); convert it with iconv first") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}, after line {done}: damaged gzip file ({error})") from error


def _with_progress(raw: IO[bytes], path: Path, progress: Callable[[int], None] | None) -> Iterator[bytes]:
    reported = 0
    with unpacked(raw, path) if path.suffix == ".gz" else raw as lines:
        for number, line in enumerate(iter(partial(lines.readline, LONGEST_LINE), b"")):
            if len(line) == LONGEST_LINE:
                raise DataError(f"{path}, line {number + 1}: over {LONGEST_LINE:,} bytes, more than a line may have")
            if progress is not None and number % 1024 == 0:
                progress(raw.tell() - reported)
                reported = raw.tell()
            yield line
        if progress is not None:
            progress(raw.tell() - reported)
