"""Where a host keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

from pretrain.base.errors import DataError


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/capt``, or ``~/.cache/capt``: what a host keeps between jobs, such as shard sets it built."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "capt"


def require_cache(folder: Path) -> None:
    """Make ``folder``, which is the cache or lies in it. Raises ``DataError`` where it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(folder, os.W_OK | os.X_OK) else "no permission, or a read-only file system"
    except OSError as error:
        problem = str(error.strerror)
    if problem is not None:
        raise DataError(
            f"{folder}: the cache cannot be written ({problem}); set data.cache to a folder that can be, or the "
            "environment variable XDG_CACHE_HOME for all jobs"
        )
