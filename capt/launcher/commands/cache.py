"""``capt cache``: what the cache of this host holds, and its removal."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.errors import ConfigError, DataError
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
"""The names of their entries, hashes; a hidden folder is one that a job did not finish."""


@dataclass(frozen=True)
class CacheEntry:
    """A file or folder of the cache.

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
    """List the entries of ``cache``, the oldest first; unfinished entries of jobs that were killed as well."""
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
            # Some kinds of entries are locked by a hidden file, others by a visible one.
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


app = typer.Typer(help="List and prune what this host keeps between jobs.", rich_markup_mode=None)

Cache = Annotated[
    Path | None, typer.Option(help="The data.cache of your jobs (default: $XDG_CACHE_HOME/capt or ~/.cache/capt).")
]
_DAY = 24 * 3600


@app.command("list", epilog="\b\nExample: capt cache list")
def list_entries(cache: Cache = None, json: o.Json = False) -> None:
    """List the files and folders of the cache with kind, size and age, the oldest first, and their sum."""
    from capt.pretrain.base.cache import default_cache

    cache = cache or default_cache()
    entries = cache_entries(cache)
    if json:
        o.echo_json(
            [{"kind": e.kind, "path": str(e.path), "bytes": e.bytes, "days": round(e.age / _DAY, 2)} for e in entries]
        )
        return
    for entry in entries:
        typer.echo(f"{entry.kind:<10}  {_as_size(entry.bytes):>9}  {entry.age / _DAY:7.1f} days  {entry.path}")
    total = _as_size(sum(entry.bytes for entry in entries))
    typer.echo(f"{cache}: {len(entries):,} {'entry' if len(entries) == 1 else 'entries'}, {total}")


@app.command(epilog="\b\nExample: capt cache prune --older-than 30")
def prune(
    older_than: Annotated[float | None, typer.Option(min=0, help="Remove what is older, in days.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all of it.")] = False,
    cache: Cache = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove old entries of the cache, or all of them; jobs make again what they need.

    What a job is making, or has open on this host, stays.
    """
    from capt.pretrain.base.cache import default_cache

    if (older_than is None) is not everything:
        raise ConfigError("capt cache prune: give --older-than DAYS or --all, one of them")
    freed = 0
    for entry in cache_entries(cache or default_cache()):
        if older_than is not None and entry.age < older_than * _DAY:
            continue
        if not dry_run and not remove_entry(entry):
            typer.echo(f"{entry.path}: in use by a job, not removed")
            continue
        freed += entry.bytes
        typer.echo(f"{entry.path}: {'would be removed' if dry_run else 'removed'} ({_as_size(entry.bytes)})")
    typer.echo(f"{_as_size(freed)} {'would be freed' if dry_run else 'freed'}")


def _as_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
