"""Arrays in files: hashed while they are written, mapped when they are read.

Type and shape of an array are known from the record of its folder, so that nothing is taken from a file before its
length and its first bytes are what the record asks for. Folders with such arrays appear whole
(`capt.pretrain.base.locks.make_folder_once`, `capt.pretrain.base.atomic.new_folder`), and their records hold hashes
(`capt.pretrain.base.verification`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import open_regular
from capt.pretrain.base.verification import check_size

HEADER_BYTES = 128
"""Bytes before the values in a ``.npy`` file, whatever its shape: so it is known before the shape is."""
_AT_ONCE = 1 << 20
"""Bytes that a growing array holds in memory before they are written."""


class ArrayFile(NamedTuple):
    """Type (as numpy writes it) and shape of an array in a file, which begins with numpy's header or holds values
    alone."""

    dtype: str
    shape: tuple[int, ...]
    has_header: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape[1:], dtype=np.int64))

    @property
    def length(self) -> int:
        """Length of the file in bytes."""
        return len(self.header()) + self.shape[0] * self.row_bytes

    def header(self) -> bytes:
        """The first bytes of the file: numpy's format 1.0, padded to ``HEADER_BYTES``."""
        if not self.has_header:
            return b""
        # Written by hand, byte for byte, so that a header can be compared and the length known before the shape.
        fields = f"{{'descr': {self.dtype!r}, 'fortran_order': False, 'shape': {self.shape!r}, }}".encode()
        before = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
        return before + fields.ljust(HEADER_BYTES - 11) + b"\n"


def write_array(path: Path, layout: ArrayFile, values: np.ndarray) -> None:
    """Write an array's file as ``layout`` says."""
    assert values.shape == layout.shape, f"{path}: {values.shape} is not {layout.shape}"
    with path.open("xb") as file:
        file.write(layout.header())
        file.write(np.ascontiguousarray(values, dtype=layout.dtype).data)


def map_array(path: Path, layout: ArrayFile, remedy: str = "") -> np.ndarray:
    """The values of an array's file, mapped for reading.

    Nothing is taken from the file before its length and first bytes are known to be what ``layout`` says.

    Raises:
        DataError: they are not, or there is no such file; the message ends with ``remedy``.
    """
    try:
        size, wanted = check_size(path, None, DataError, remedy).size, layout.header()
        with open_regular(path) as file:
            # The file's own header is not believed: it must be the one that the record asks for.
            if size != layout.length or file.read(len(wanted)) != wanted:
                raise DataError(
                    f"{path} is damaged: {layout.length} bytes of {layout.dtype} {list(layout.shape)} are expected, "
                    f"found {size} bytes{remedy}"
                )
            if size == len(wanted):  # what has no values cannot be mapped
                return np.zeros(layout.shape, layout.dtype)
            mapped = np.memmap(file, dtype=layout.dtype, mode="r", offset=len(wanted), shape=layout.shape)
    except DataError:
        raise
    except (OSError, ValueError) as problem:  # ValueError: it has become shorter
        raise DataError(f"{path}: cannot be mapped: {problem}{remedy}") from problem
    # A plain view: memmap's own class makes every slice slower.
    return mapped.view(np.ndarray)


def map_whole(path: Path, dtype: Any) -> np.ndarray:
    """The values of a file of our own that holds numbers alone, all that its length gives; raises as `map_array`."""
    dtype = np.dtype(dtype)
    return map_array(path, ArrayFile(dtype.str, (path.stat().st_size // dtype.itemsize,), has_header=False))


class Column:
    """An array that grows by rows: in a new file, or in memory without a path.

    Args:
        path: the file. It is opened for each mebibyte anew, so that there is nothing to close after an error.
        dtype: of the values.
        row: the shape of a row; () = a number.
        has_header: whether the file begins with numpy's header.
    """

    def __init__(self, path: Path | None, dtype: Any, row: tuple[int, ...] = (), *, has_header: bool = False) -> None:
        self.path, self.dtype, self._row, self._has_header = path, np.dtype(dtype), row, has_header
        self._row_bytes = self.layout_of(0).row_bytes
        self._hash, self._bytes = hashlib.sha256(), 0
        self._held = bytearray()

    def append(self, values: Any) -> None:
        """Append rows: an array, or a sequence of numbers."""
        self._held += np.asarray(values, dtype=self.dtype).tobytes()
        if len(self._held) >= _AT_ONCE and self.path is not None:
            self._flush(self.path)

    def __len__(self) -> int:
        return (self._bytes + len(self._held)) // self._row_bytes

    def layout_of(self, rows: int) -> ArrayFile:
        """Type and shape of the array when it has that many rows."""
        return ArrayFile(self.dtype.str, (rows, *self._row), self._has_header)

    def finish(self) -> np.ndarray:
        """Write what is left. Return the array, of one in a file none of its rows."""
        layout = self.layout_of(len(self))
        if self.path is None:
            self._hash.update(self._held)
            return np.frombuffer(self._held, self.dtype).reshape(layout.shape)
        self._flush(self.path)
        with self.path.open("r+b") as file:
            file.write(layout.header())
        return np.zeros((0, *self._row), self.dtype)

    def _flush(self, path: Path) -> None:
        with path.open("ab" if self._bytes else "xb") as file:
            if self._has_header and not self._bytes:
                file.write(bytes(HEADER_BYTES))  # room: the number of rows is known last
            file.write(self._held)
        self._hash.update(self._held)
        self._bytes += len(self._held)
        self._held = bytearray()

    @property
    def sha256(self) -> str:
        """SHA-256 of the values that are written, in hexadecimal: after `finish` of all, a header apart."""
        return self._hash.hexdigest()
