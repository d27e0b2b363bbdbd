"""Arrays in ``.npy`` files whose types and shapes are known from elsewhere, so that no file is asked for its own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.base.errors import DataError
from pretrain.base.files import open_regular
from pretrain.base.hashing import check_size

HEADER_BYTES = 128
"""Bytes before the values in an array's file, whatever its shape: so it is known before the shape is."""


class ArrayFile(NamedTuple):
    """Type (as numpy writes it) and shape of an array in a ``.npy`` file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape[1:], dtype=np.int64))

    @property
    def length(self) -> int:
        """Length of the file in bytes."""
        return HEADER_BYTES + self.shape[0] * self.row_bytes

    def header(self) -> bytes:
        """The first bytes of the file: numpy's format 1.0, padded to ``HEADER_BYTES``."""
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
        size = check_size(path, None, DataError).size
        with open_regular(path) as file:
            header = file.read(HEADER_BYTES)
            if size != layout.length or header != layout.header():
                raise DataError(
                    f"{path} is damaged: {layout.length} bytes of {layout.dtype} {list(layout.shape)} are expected, "
                    f"found {size} bytes{remedy}"
                )
            mapped = np.memmap(file, dtype=layout.dtype, mode="r", offset=HEADER_BYTES, shape=layout.shape)
    except DataError:
        raise
    except (OSError, ValueError) as problem:  # ValueError: it has become shorter
        raise DataError(f"{path}: cannot be mapped: {problem}") from problem
    return mapped.view(np.ndarray)
