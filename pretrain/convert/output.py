"""Write an export into a temporary folder beside the target, and rename it into place after its check."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.base.atomic import new_folder
from pretrain.base.errors import CheckpointError
from pretrain.base.files import public_mode

_MARK = "config.json"
"""Every export holds this file; a folder without it is never replaced."""


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Raise ``CheckpointError`` unless ``out`` is free, an empty folder, or an older export that may be replaced."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out}: exists and is not a folder; give a new folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"{out}: the folder is not empty; give a new one, or --overwrite to replace an older export"
        )
    if not (out / _MARK).is_file():
        raise CheckpointError(f"{out}: --overwrite replaces older exports only, and this folder holds no {_MARK}")


@contextmanager
def export_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``out`` that becomes ``out`` when the block succeeds (`new_folder`).

    Raises:
        CheckpointError: ``out`` is taken, its parent cannot be written, or the disk is full.
    """
    refuse_existing(out, overwrite=overwrite)
    try:
        with new_folder(out, replace=True) as folder:
            yield folder
            mode = public_mode()  # safetensors and temporary files are made for their owner alone
            for path in folder.rglob("*"):
                if path.is_file():
                    path.chmod(mode)
    except Exception as error:
        if _disk_is_full(error):
            raise CheckpointError(f"{out}: cannot be written: no space left on the disk") from error
        if isinstance(error, OSError) and error.filename and Path(error.filename).is_relative_to(out.parent):
            raise CheckpointError(f"{out}: cannot be written: {error.strerror}") from error
        raise


def _disk_is_full(error: Exception) -> bool:
    """True for the OSError and for what the Rust writers (safetensors, tokenizers) raise instead of it."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
