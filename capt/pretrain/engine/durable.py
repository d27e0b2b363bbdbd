"""Writing files so that they are durable and no row of them is lost, with errors that say when a disk is full."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from capt.pretrain.base.atomic import sync
from capt.pretrain.base.errors import FILE_LIMIT, CheckpointError, NoSpaceError, space_remedy
from capt.pretrain.base.files import open_for_append


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file and make it durable.

    Raises:
        CheckpointError: the file could not be written; the text names the path, and the space needed and left.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
        # One entry has no order.
        if len(metadata) > 1:
            _sort_metadata(path)
        sync(path)
    except (OSError, SafetensorError) as error:
        need = sum(t.numel() * t.element_size() for t in tensors.values())
        raise write_error(path, error, need) from error


def _sort_metadata(path: Path) -> None:
    """Put the metadata of a safetensors file in order of names: the library's order is random."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        # Padded with spaces, as the format allows: offsets count from the end of the header, whose length must stay.
        ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
        assert len(ordered) == length, "the same header in another order"
        file.seek(8)
        file.write(ordered)


class GrowingFile:
    """A file to which rows are appended. What a full disk does not take is kept, and tried again with the next."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises ``DataError``: a link, a FIFO or a folder is in its place."""
        self.path = path
        self._file = open_for_append(path)
        self._waiting = b""

    def append(self, row: bytes) -> None:
        """Add a row. Raises ``OSError``: it cannot be written now, but is not lost."""
        self._waiting += row
        self.flush()

    def flush(self) -> None:
        """Give the operating system what is waiting. Raises ``OSError``."""
        try:
            while self._waiting:
                # A write may take only a part of the bytes.
                self._waiting = self._waiting[os.write(self._file.fileno(), self._waiting) :]
        except OSError as error:
            error.filename = str(self.path)  # a write does not say of which file
            raise

    def sync(self) -> None:
        """Make all rows durable, before a checkpoint that contains their steps is. Raises ``CheckpointError``."""
        try:
            self.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self.path, error) from error

    def close(self) -> None:
        """Close the file; what is waiting still is lost."""
        self._file.close()


def is_full(error: OSError) -> bool:
    """Return whether an error of a write says that there is no space, which may be there again later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_error(path: Path, error: Exception, need: int | None = None) -> CheckpointError:
    """The error of a failed write, in one line; a full disk is called one, with the bytes needed where they are known.

    It is a `NoSpaceError` where space, inodes or the user's quota are used up.
    """
    free = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
    number = error.errno if isinstance(error, OSError) and error.errno else _number_in(str(error))
    # The library told no number: the room that is left tells.
    if number is None and need is not None and free < need:
        number = errno.ENOSPC
    if number is None or not (remedy := space_remedy(number, path)):
        limit = f"; {FILE_LIMIT}" if number == errno.EFBIG else ""
        return CheckpointError(f"{path}: could not be written: {error}{limit}")
    needs = "" if need is None else f"the file needs {need:,} bytes, "
    return NoSpaceError(
        f"{path}: {os.strerror(number)[0].lower()}{os.strerror(number)[1:]}: {needs}{free:,} are free; {remedy}"
    )


def _number_in(text: str) -> int | None:
    """The error of the system that the text of another library's error tells."""
    if match := re.search(r"os error (\d+)", text):
        return int(match[1])
    return next((number for number in (errno.ENOSPC, errno.EDQUOT) if os.strerror(number) in text), None)
