"""What the cache of this host holds, and its removal."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.locks import file_lock

KINDS = (
    "answers",
    "docstrings",
    "embeddings",
    "finetune",
    "microworld",
    "pairs",
    "regions",
    "shards",
    "stored",
    "tokenizers",
    "vectors",
)
"""The folders of the cache."""
_KEY = r"(docstrings-)?[0-9a-f]{16,64}"
_NAME = re.compile(rf"{_KEY}(\.\w+)*|\.{_KEY}(\.\w+)*\.[0-9]+\.partial")
"""What is in them is named by a hash; a hidden folder is one that a job did not finish."""


@dataclass(frozen=True)
class CacheEntry:
    """One file or folder of the cache.

    Attributes:
        kind: one of `KINDS`.
        path: where it is.
        bytes: its size on disk.
        age: seconds since it was made.
    """

    kind: str
    path: Path
    bytes: int
    age: float


def cache_entries(cache: Path) -> list[CacheEntry]:
    """What ``cache`` holds, the oldest first; unfinished entries of jobs that were killed as well."""
    now = time.time()
    entries = []
    for kind in KINDS:
        for path in (cache / kind).iterdir() if (cache / kind).is_dir() else ():
            if _NAME.fullmatch(path.name) and path.suffix != ".lock":
                entries.append(CacheEntry(kind, path, _size(path), max(0.0, now - path.lstat().st_mtime)))
    return sorted(entries, key=lambda entry: (-entry.age, entry.path))


def remove_entry(entry: CacheEntry) -> bool:
    """Remove an entry, unless a job holds its lock or, on this host, has a file of it open. Return whether it is gone.

    A job that wants the entry meanwhile waits, and makes it again.
    """
    key = entry.path.name.removeprefix(".").split(".")[0]
    with ExitStack() as stack:
        try:
            for name in (f".{key}.lock", f"{key}.lock"):
                stack.enter_context(file_lock(entry.path.with_name(name), remove=True, error=DataError))
        except DataError:
            return False
        place = entry.path.absolute()
        if any(place == path or place in path.parents for path in _open_files()):
            return False
        if entry.path.is_dir() and not entry.path.is_symlink():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink()
    return True


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*"))


def _open_files() -> Iterator[Path]:
    """The files that processes of this host have mapped or open, as far as this user may see them."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            maps = (process / "maps").read_text(encoding="utf-8", errors="surrogateescape")
            yield from {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if " /" in line}
            for link in (process / "fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    yield Path(os.readlink(link))
