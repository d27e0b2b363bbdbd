"""Writing files so that they are durable and no row of them is lost, with errors that say when a disk is full."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pretrain.base.atomic import sync
from pretrain.base.errors import CheckpointError
from pretrain.base.files import open_for_append


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file and make it durable.

    Raises:
        CheckpointError: the file could not be written; the text names the path, and the space needed and left.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
        if len(metadata) > 1:
            _sort_metadata(path)
        sync(path)
    except (OSError, SafetensorError) as error:
        need = sum(t.numel() * t.element_size() for t in tensors.values())
        raise CheckpointError(describe_write_error(path, error, need)) from error


def _sort_metadata(path: Path) -> None:
    """Put the metadata of a safetensors file in order of names: the library's order is random."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
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
                self._waiting = self._waiting[os.write(self._file.fileno(), self._waiting) :]
        except OSError as error:
            error.filename = str(self.path)  # a write does not say of which file
            raise

    def sync(self) -> None:
        """Make all rows durable. Raises ``OSError``."""
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; what is waiting still is lost."""
        self._file.close()


def is_full(error: OSError) -> bool:
    """Whether an error of a write says that there is no space, which may be there again later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def describe_write_error(path: Path, error: Exception, need: int | None = None) -> str:
    """Describe a failed write in one line; a full disk is called one, with the bytes needed where they are known."""
    free = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
    full = (isinstance(error, OSError) and is_full(error)) or "os error 28" in str(error)
    if full or "No space" in str(error) or (need is not None and free < need):
        needs = "" if need is None else f"the file needs {need:,} bytes, "
        return f"{path}: no space left on the device: {needs}{free:,} are free; free some, or use another disk"
    return f"{path}: could not be written: {error}"
