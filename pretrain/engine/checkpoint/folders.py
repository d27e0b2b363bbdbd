"""Links to checkpoints, and removing them so that a kill at any moment leaves nothing that looks like one."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from pretrain.base.atomic import sync

_REPLACED = ".replaced"


def point(name: str, target: Path) -> None:
    """Let the link ``name`` (``latest``, ``best``) beside ``target`` lead to it, in one step."""
    link = target.with_name(f".{name}.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    link.replace(target.with_name(name))
    sync(target.parent)


def sync_tree(folder: Path) -> None:
    """Make the entries of a folder and of all folders in it durable."""
    for inner in folder.rglob("*"):
        if inner.is_dir() and not inner.is_symlink():
            sync(inner)
    sync(folder)


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to ``WHY-step-...``, which nothing takes for one, and return its new path."""
    kept = path.with_name(f"{why}-{path.name}-{time.time_ns()}")
    path.rename(kept)
    sync(path.parent)
    return kept


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a complete checkpoint to ``target``; what is there now is removed only once its successor is durable.

    A kill between the two renames leaves the old one under a hidden name, for `put_back_replaced`.
    """
    aside = target.with_name(f".{target.name}{_REPLACED}")
    replaces = target.exists()
    if replaces:
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        if replaces:
            aside.rename(target)
        raise
    sync(target.parent)
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)  # else `remove_leftovers` does it


def put_back_replaced(run_dir: Path) -> list[Path]:
    """Rename back what a killed `put_in_place` has moved out of the way. The caller holds the folder."""
    found = []
    for aside in (run_dir / "checkpoints").glob(f".step-*{_REPLACED}"):
        target = aside.with_name(aside.name[1:].removesuffix(_REPLACED))
        if not target.exists():
            aside.rename(target)
            sync(target.parent)
            found.append(target)
    return found


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint. What is left by a crash meanwhile has a hidden name, for `remove_leftovers`.

    Raises:
        OSError: there is a link at ``path`` or in the place of its folder: what it leads to is not ours.
    """
    hidden = f".{path.name}.removed"
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        shutil.rmtree(hidden, ignore_errors=True, dir_fd=folder)
        os.rename(path.name, hidden, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)  # else a host that crashes may keep the name, and lose what was below it
        shutil.rmtree(hidden, dir_fd=folder)
    finally:
        os.close(folder)


def remove_leftovers(run_dir: Path) -> list[Path]:
    """Remove what killed saves and removals left. The caller holds the folder.

    A rank of a job before may still live, where its host is cut off. A folder is renamed before it is removed, so that
    such a rank finds none to write into.
    """
    found = [
        path
        for pattern in (".step-*.partial", ".step-*.removed", f".step-*{_REPLACED}", ".latest.tmp", ".best.tmp")
        for path in (run_dir / "checkpoints").glob(pattern)
    ]
    for path in found:
        if path.is_dir() and not path.is_symlink():
            hidden = path.with_name(f"{path.name.removesuffix('.removed')}.removed")
            path.rename(hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink()
    return found
