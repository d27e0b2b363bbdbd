"""The cache folders of a host: files that can be made again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from capt.pretrain.base.errors import ConfigError, DataError

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/capt``, or ``~/.cache/capt``: what a host keeps between jobs, such as shard sets it built."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "capt"


def require_cache(folder: Path) -> None:
    """Make ``folder``, which is the cache or is in it. Raises ``DataError`` where it cannot be made or written."""
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


def use_own_compile_cache() -> None:
    """Have torch keep what it compiles in a folder of this user alone, unless the environment names another one.

    Its default is a folder of a guessable name among the temporary files, which another user may have made first; and
    the code in it is executed.

    Raises:
        ConfigError: others can write into the folder.
    """
    if _COMPILED in os.environ:
        return
    folder = default_cache() / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(f"{folder}: others can write there, and code in it would be executed; remove it")
    os.environ[_COMPILED] = str(folder)
