"""``capt cache``: what the cache of this host holds, and its removal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capt.launcher.commands import options as o

app = typer.Typer(help="List and prune what this host keeps between jobs.", rich_markup_mode=None)

Cache = Annotated[
    Path | None, typer.Option(help="The data.cache of your jobs (default: $XDG_CACHE_HOME/capt or ~/.cache/capt).")
]
_DAY = 24 * 3600


@app.command("list", epilog="\b\nExample: capt cache list")
def list_entries(cache: Cache = None, json: o.Json = False) -> None:
    """List the files and folders of the cache with kind, size and age, the oldest first, and their sum."""
    from capt.launcher.cache import cache_entries
    from capt.pretrain.base.cache import default_cache

    cache = cache or default_cache()
    entries = cache_entries(cache)
    if json:
        o.echo_json(
            [{"kind": e.kind, "path": str(e.path), "bytes": e.bytes, "days": round(e.age / _DAY, 2)} for e in entries]
        )
        return
    for entry in entries:
        typer.echo(f"{entry.kind:<10}  {_size(entry.bytes):>9}  {entry.age / _DAY:7.1f} days  {entry.path}")
    total = _size(sum(entry.bytes for entry in entries))
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
    from capt.launcher.cache import cache_entries, remove_entry
    from capt.pretrain.base.cache import default_cache
    from capt.pretrain.base.errors import ConfigError

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
        typer.echo(f"{entry.path}: {'would be removed' if dry_run else 'removed'} ({_size(entry.bytes)})")
    typer.echo(f"{_size(freed)} {'would be freed' if dry_run else 'freed'}")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
