"""Writing files of tensors so that they are durable, with errors that say when a disk is full."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pretrain.base.atomic import sync
from pretrain.base.errors import CheckpointError


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file and make it durable.

    Raises:
        CheckpointError: the file could not be written; the text names the path, and the space needed and left.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
        sync(path)
    except (OSError, SafetensorError) as error:
        need = sum(t.numel() * t.element_size() for t in tensors.values())
        raise CheckpointError(describe_write_error(path, error, need)) from error


def describe_write_error(path: Path, error: Exception, need: int | None = None) -> str:
    """Describe a failed write in one line; a full disk is called one, with the bytes needed where they are known."""
    free = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
    if full or "No space" in str(error) or (need is not None and free < need):
        needs = "" if need is None else f"the file needs {need:,} bytes, "
        return f"{path}: no space left on the device: {needs}{free:,} are free; free some, or use another disk"
    return f"{path}: could not be written: {error}"
