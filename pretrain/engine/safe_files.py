"""Files that are either whole or not there: fsync, rename; and free-space errors that say so."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tokenizer.errors import CheckpointError


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    with path.open("rb") as f:
        os.fsync(f.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write JSON through a temporary file, fsync and rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as f:
        json.dump(value, f, indent=1, sort_keys=True)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file and make it durable.

    Raises:
        CheckpointError: the file could not be written; the text names the path, and the space needed and left.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
        sync_file(path)
    except (OSError, SafetensorError) as error:
        need = sum(t.numel() * t.element_size() for t in tensors.values())
        raise CheckpointError(describe_write_error(path, error, need)) from error


def describe_write_error(path: Path, error: Exception, need: int) -> str:
    """One line for a failed write; a full disk is called a full disk."""
    free = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
    if getattr(error, "errno", None) == 28 or "os error 28" in str(error) or "No space" in str(error) or free < need:
        return f"{path}: no space left on the device: the file needs {need:,} bytes, {free:,} are free"
    return f"{path}: could not be written: {error}"
