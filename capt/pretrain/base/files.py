"""Opening files that somebody else may have put there: regular files only, bounded, and never through a planted link.

A folder that several people can write to, or that came in an archive, may hold a link where we are about to write, a
FIFO where we are about to read (opening one never returns), or a file of a terabyte of zeros. Every small file of a
run, a checkpoint, a tokenizer or a cache is read and written by these functions.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import json
import math
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from capt.pretrain.base.errors import ConfigError, DataError, UserError, repeated, shown

SMALL = 64 << 20
"""Bytes that a manifest, a status or a configuration may have at most."""

_POINTER, _MOST_POINTER = b"version https://git-lfs.github.com/spec/", 1024
"""The beginning of what a clone without Git LFS has in the place of a large file, and its bytes at most."""


@contextmanager
def open_regular(path: Path, *, error: type[UserError] = DataError) -> Iterator[BufferedReader]:
    """Open a file for reading if it is a regular file (a link to one counts), without waiting for a FIFO's writer.

    Raises:
        UserError: of the class ``error``: it is a folder, a FIFO, a socket or a device, or the pointer that Git LFS
            has in the place of a file. ``OSError`` passes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path}: not a regular file")
        if status.st_size <= _MOST_POINTER and os.pread(descriptor, len(_POINTER), 0) == _POINTER:
            raise error(f"{path}: a pointer of Git LFS, not the file that it names; `git lfs pull` fetches that")
        file = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    with file:
        yield file


def file_in(folder: Path, name: str) -> Path | None:
    """The file ``name`` of a folder that may come from somebody else; None where there is none.

    The hub client's cache is made of links, from ``snapshots/<revision>/<file>`` to ``blobs/<hash>``: these are
    followed, others are not, since they could show any file of this host.

    Raises:
        DataError: it is not a regular file, or a link to somewhere else.
    """
    path = folder / name
    try:
        linked = stat.S_ISLNK(path.lstat().st_mode)
        if linked and not is_in_hub_cache(path):
            raise DataError(f"{path}: a link; only those of the hub's cache are followed, put the file itself there")
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{path}: not a regular file")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return path


def files_below(path: Path) -> list[Path]:
    """A file, or those in a folder and the folders below it; none of a path that is neither."""
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())


def is_in_hub_cache(path: Path) -> bool:
    """Return whether a link leads from a ``snapshots`` folder of the hub client's cache to ``blobs`` beside it."""
    target = Path(os.path.realpath(path))
    snapshots = (parent for parent in path.absolute().parents if parent.name == "snapshots")
    return any(target.parent == Path(os.path.realpath(folder.parent / "blobs")) for folder in snapshots)


def read_bytes(path: Path, *, limit: int = SMALL, error: type[UserError] = DataError) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        UserError: of the class ``error``: the file is not regular, or too large. ``OSError`` passes.
    """
    with open_regular(path, error=error) as file:
        # One byte more than allowed: a look at the size would miss a file that grows.
        content = file.read(limit + 1)
    if len(content) > limit:
        raise error(f"{path}: over {limit:,} bytes, which is the most that is read of such a file")
    return content


def read_text(path: Path, *, limit: int = SMALL, error: type[UserError] = DataError) -> str:
    """``read_bytes`` as UTF-8 text (a byte order mark is dropped). Raises ``error`` naming the first bad byte."""
    try:
        return read_bytes(path, limit=limit, error=error).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path}: not UTF-8 text (byte {problem.start})") from None


def read_json(path: Path, *, limit: int = SMALL, error: type[UserError] = DataError) -> Any:
    """``read_text`` parsed as JSON; ``NaN`` and ``Infinity``, which are no JSON, are refused. Raises ``error``."""
    return parse_json(read_text(path, limit=limit, error=error), path, error=error)


def parse_json(text: str | bytes, source: Path | str, *, error: type[UserError] = DataError) -> Any:
    """The JSON that was read from ``source``; raises as `read_json`."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as problem:  # ValueError: a number of thousands of digits, bytes of no text
        raise error(f"{source}: not valid JSON: {printable(str(problem))}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as ``object_pairs_hook``. Raises ``ValueError`` for a key that occurs twice: one would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = repeated(name for name, _ in pairs)
        raise ValueError(f"the key {shown(twice)} occurs twice in one object")
    return row


parse_row = json.JSONDecoder(object_pairs_hook=unique_keys).decode
"""The value of a line of JSON. Raises ``ValueError`` as `unique_keys`, and for what is not JSON."""


def is_utf8(text: str) -> bool:
    """Return whether a text can be written: names of files may be of other bytes, JSON may hold half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def number_in(text: str) -> float | None:
    """The number that a text is, as files have it; None for any other text.

    Also for the underscores and the digits of other scripts that Python allows: ``1_0`` is a name.
    """
    if not text.isascii() or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def printable(text: str, limit: int = 300) -> str:
    """A text in one line of at most ``limit`` characters, without what cannot be shown."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())[:limit]


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a whole file: a temporary of random name beside it, fsync, rename. A link at ``path`` is replaced.

    ``private`` files are for their owner alone (0600); others have the permissions that the umask leaves (0644).
    """
    with replacing(path, private=private) as (file, _):
        file.write(content)


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[tuple[IO[bytes], Path]]:
    """Yield an empty file of random name beside ``path`` and that name; the file becomes ``path`` in one rename when
    the block ends well, and is removed otherwise. A link at ``path`` is replaced. ``private`` as in `write_bytes`.

    Raises:
        ConfigError: ``path`` is a device, or leads to one: a superuser would put a file in the place of ``/dev/null``.
    """
    _refuse_device(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # A name may be nearly as long as the file system takes, and more is added to it here.
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        error.filename = str(path)
        raise
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file, Path(name)
            file.flush()
            # mkstemp makes it for its owner alone.
            if not private:
                os.fchmod(file.fileno(), public_mode())
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, name):
            error.filename = str(path)  # a write does not say of which file, and the random name says nothing
        raise


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """``write_bytes`` of UTF-8 text."""
    write_bytes(path, text.encode("utf-8"), private=private)


def finite(value: Any) -> Any:
    """A value of JSON with None in the place of numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """``write_bytes`` of JSON. Raises ``ValueError`` for a number that is not finite, which JSON cannot hold."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", private=private)


def open_for_append(path: Path, *, error: type[UserError] = DataError) -> IO[str]:
    """Open a UTF-8 text file to append to, making it if need be; never through a link.

    Raises:
        UserError: of the class ``error``: a link, a FIFO or a folder is in its place.
    """
    return os.fdopen(_own(path, os.O_WRONLY | os.O_APPEND, error), "a", encoding="utf-8")


def open_lock(path: Path, *, error: type[UserError] = DataError) -> IO[str]:
    """Open a file to lock it, making it if need be; its content stays as it is. Raises as ``open_for_append``."""
    return os.fdopen(_own(path, os.O_RDWR, error), "r+", encoding="utf-8")


def _own(path: Path, flags: int, error: type[UserError]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        # In this order: a link, a FIFO that nobody reads, a folder.
        if problem.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise error(f"{path}: a link, FIFO or folder is in the place of a file of our own; remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path}: not a regular file; remove it")
    return descriptor


def require_own_folder(path: Path, *, error: type[UserError] = DataError) -> None:
    """Refuse a link where a folder of our own belongs: what is written or removed below it would be somebody else's.

    A path at which nothing is, is fine. Raises ``error``.
    """
    if path.is_symlink():
        raise error(f"{path}: a link is in the place of a folder of our own; remove it")


def _refuse_device(path: Path) -> None:
    with suppress(OSError):
        mode = path.stat().st_mode
        # A pipe behind a link is /dev/stdout, say; a FIFO in a folder would only be replaced.
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or (path.is_symlink() and stat.S_ISFIFO(mode)):
            raise ConfigError(f"{path} is a device or a pipe, and not a file: name a file to write")


def require_writable(path: Path) -> None:
    """Refuse, before hours of work for it, a file that cannot be written. Raises ``ConfigError``."""
    _refuse_device(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file to write")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"{path} cannot be written: {folder} is not a folder in which you may write")


def public_mode() -> int:
    """The permissions that the umask leaves to a new file."""
    # The mask cannot be read without setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask


# Lines of UTF-8 text files, also of packed ones.


LONGEST_LINE = 64 << 20
"""Bytes of a line of text at most: a small archive may hold a line of terabytes."""


_ALWAYS = 64 << 20
_RATIO = 200
"""Bytes that a packed file may hold in any case, and for each of its own: text is packed to a third or a tenth."""


def most_unpacked(packed: int) -> int:
    """The most bytes that are read of a file of ``packed`` bytes."""
    return _ALWAYS + _RATIO * packed


def require_ratio(path: object, unpacked: int, packed: int) -> None:
    """Refuse a file that unpacks to far more than text does, before hours go into it. Raises ``DataError``."""
    if unpacked > most_unpacked(packed):
        raise DataError(
            f"{path}: {packed:,} bytes hold over {unpacked:,} bytes of text, more than {_RATIO} times their size; if "
            "that is right, unpack the file and name the result"
        )


def require_stored(path: Path, *, error: type[UserError] = DataError) -> None:
    """Refuse a zip of arrays whose entries are packed: numpy and torch write them as they are, and read any.

    Raises:
        UserError: of the class ``error``: the entries have more bytes than the file, or it is no whole zip. ``OSError``
            passes.
    """
    try:
        with open_regular(path, error=error) as file, zipfile.ZipFile(file) as archive:
            held = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as problem:
        if isinstance(problem, UserError):
            raise
        raise error(f"{path}: not a whole zip of arrays: {printable(str(problem))}") from None
    if held > (size := path.stat().st_size):
        raise error(
            f"{path}: {size:,} bytes hold {held:,} bytes of arrays, and no more than the file has are read; write it "
            "again without compression"
        )


PACKED = {".gz": "gzip", ".zst": "zstd"}
"""Ends of the names of packed files, and what they are packed with."""
_PACKED_STARTS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}


class DamagedError(OSError):
    """The content of a packed file ends early, or is not what its kind has."""


DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, DamagedError)
"""Errors of reading a packed file that is damaged."""


class _Unpacked(io.RawIOBase):
    """The content of a packed file, as long as it is not far more than its bytes so far can be of text."""

    def __init__(self, raw: IO[bytes], path: object) -> None:
        self._raw, self._path, self._count = raw, path, 0
        self._file: Any = _Zstd(raw) if str(path).endswith(".zst") else gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)
        self._count += count
        require_ratio(self._path, self._count, self._raw.tell())
        return count


_ZSTD_AT_ONCE = 1 << 10
"""Bytes that are unpacked at a time: a frame may hold 128 KiB in four of them, and what they give comes as a whole."""


class _Zstd:
    """The content of a file of zstd frames."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._raw, self._frame, self._rest = raw, self._new(), memoryview(b"")
        self._begun = False

    def readinto(self, buffer: Any) -> int:
        """Fill a part of ``buffer``. Raises `DamagedError`."""
        while not self._rest:
            # A file may hold several frames: what is left behind the end of one begins the next.
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = self._new(), False
            packed = packed or self._raw.read(_ZSTD_AT_ONCE)
            if not packed:
                if self._begun:
                    raise DamagedError("it ends within a frame")
                return 0
            self._begun = True
            try:
                # A view: what is left of a long piece is not copied at each read.
                self._rest = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise DamagedError(str(error)) from None
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


_OTHER_FORMS = (
    ((b"\xff\xfe\0\0", b"\0\0\xfe\xff"), "it begins as UTF-32 does; convert it: iconv -f utf-32 -t utf-8 FILE"),
    ((b"\xff\xfe", b"\xfe\xff"), "it begins as UTF-16 does; convert it: iconv -f utf-16 -t utf-8 FILE"),
    ((_PACKED_STARTS[".gz"],), "it is packed with gzip; unpack it, or name it .gz"),
    ((_PACKED_STARTS[".zst"],), "it is packed with zstd; unpack it, or name it .zst"),
    ((b"PAR1\x15",), "it is a parquet file; name it .parquet"),
    ((b"%PDF-",), "it is a PDF; extract its text"),
    ((b"\xfd7zXZ", b"BZh91AY", b"PK\x03\x04"), "it is an archive, or packed, or a spreadsheet; unpack or export it"),
)
"""Beginnings of files that are no UTF-8 text, and what to do: converted from a guessed encoding they are nonsense."""


def other_form(start: bytes) -> str | None:
    """Say what a file beginning with ``start`` is instead of UTF-8 text, and what to do; None where it may be text."""
    return next((advice for starts, advice in _OTHER_FORMS if start.startswith(starts)), None)


def unpacked(raw: IO[bytes], path: object) -> io.BufferedReader:
    """The content of the file ``path``, packed by gzip or zstd, which is open as ``raw``.

    Reading raises ``DataError`` where a small file holds gigabytes, and one of `DAMAGED` for a damaged one.
    """
    return io.BufferedReader(_Unpacked(raw, path))


def read_lines(files: Iterable[Path]) -> Iterator[str]:
    """Yield the lines of UTF-8 text files, one after the other, without line ends; ``.gz`` and ``.zst`` are unpacked.

    Raises:
        DataError: a file is missing, not a file, empty, or as `text_lines`.
    """
    for path in files:
        if not path.is_file():
            there = "a link that leads to no file" if path.is_symlink() else "no such file"
            raise DataError(f"{path}: {'not a file' if path.exists() else there}; give UTF-8 text, or .gz of it")
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty; give UTF-8 text, or .gz of it")
        with open_regular(path) as raw:
            for _, line in text_lines(path, raw):
                yield line.rstrip("\r\n")


@runtime_checkable
class Named(Protocol):
    """A file, on a disk or in a store."""

    @property
    def name(self) -> str:
        """The last part of its path."""


def text_lines(
    path: Named, raw: BufferedReader, limit: int | None = None, *, begin: int = 0
) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line of a UTF-8 file that is open as ``raw``; the end of a line is ``\\n``.

    Lines end with ``\\n`` or ``\\r\\n`` and with nothing else. A byte order mark at the start of a line is not part of
    it: joined files have one wherever a file began. Memory is constant, however long the lines are.

    Args:
        path: the file; by its name it is packed (``.gz``, ``.zst``) or not.
        raw: its bytes, or those from ``begin`` on.
        limit: bytes of a line that comes as a whole; a longer one comes in pieces. None = a line of over 64 MiB is
            refused.
        begin: where in the file ``raw`` begins, for messages, and because another form shows at the beginning alone.

    Raises:
        DataError: a line is not valid UTF-8 or too long, the file is of another form, or damaged where it is packed.
    """
    suffix, after = Path(path.name).suffix, place_after(begin)
    number, at, rest, begins = 1, begin, b"", True
    file = unpacked(raw, path) if suffix in PACKED else raw
    try:
        if begin == 0 and (form := other_form(file.peek(8))) is not None:
            raise DataError(f"{path} is not UTF-8 text: {form}")
        while data := rest + (piece := file.readline(limit or LONGEST_LINE)):
            is_line = data.endswith(b"\n")
            if limit is None and len(piece) == LONGEST_LINE and not is_line:
                raise DataError(f"{path}, line {number}{after}: over {LONGEST_LINE:,} bytes, more than a line may have")
            # Old Macs ended lines so: the whole file would be one line.
            if at == 0 and not is_line and b"\r" in data[:-1]:
                raise DataError(rf"{path}: its lines end in carriage returns alone; tr '\r' '\n' < FILE converts them")
            is_cut = limit is not None and bool(piece) and not is_line
            text, used = codecs.utf_8_decode(data, "strict", not is_cut)
            # The cut may lie within a character, whose bytes are left, or a line end.
            if is_cut and text.endswith("\r"):
                text, used = text[:-1], used - 1
            rest, at = data[used:], at + used
            text = text[:-2] + "\n" if text.endswith("\r\n") else text
            if text := text.removeprefix("\ufeff") if begins else text:
                yield number, text
            begins = is_line
            number += is_line
    except UnicodeDecodeError as error:
        byte = f"(byte 0x{error.object[error.start]:02x}) at byte {at + error.start}"
        raise DataError(
            f"{path}, line {number}{after}: not UTF-8 text {byte}; convert it from the encoding that it has: "
            "iconv -f ENCODING -t utf-8 FILE"
        ) from None
    except DAMAGED as error:
        raw.seek(0)
        # The name may be wrong about what the file is.
        is_packed = raw.read(4).startswith(_PACKED_STARTS[suffix])
        hint = "fetch or pack it again" if is_packed else f"if it is not packed, name it without {suffix}"
        raise DataError(f"{path}, after line {number - 1}: damaged {PACKED[suffix]} file ({error}); {hint}") from error


def place_after(begin: int) -> str:
    """Say from where lines are counted, where that is not the beginning of a file."""
    return f" after byte {begin:,}" if begin else ""
