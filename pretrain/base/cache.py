"""Where a host keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/capt``, or ``~/.cache/capt``: what a host keeps between jobs, such as shard sets it built."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "capt"
