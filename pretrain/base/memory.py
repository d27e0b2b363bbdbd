"""How many bytes a process may still use of this host: its memory, and a folder that may be in it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def free_bytes(location: Path) -> int:
    """Return the bytes that may be written to a location; a tenth of it, and of the memory, is left to others."""
    location = next(folder for folder in (location, *location.absolute().parents) if folder.exists())
    usage = shutil.disk_usage(location)
    free = usage.free - usage.total // 10
    return min(free, available_memory()) if _is_memory(location) else free


def _is_memory(location: Path) -> bool:
    """Return whether a folder is in main memory."""
    best, kind = "", ""
    with suppress(OSError):
        path = os.path.realpath(location)
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            _, where, what, *_ = line.split(" ")
            inside = path == where or path.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best):
                best, kind = where, what
    return kind in ("tmpfs", "ramfs")


def available_memory() -> int:
    """Return the bytes of memory that the host and the container have free; a tenth of all is held back."""
    left = [1 << 62]
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        info = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        left.append(info["MemAvailable"] - info["MemTotal"] // 10)
    for limit, used, given_back in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, KeyError, ValueError):  # no such limit, which is then the word "max"
            group = Path("/sys/fs/cgroup")
            most = int((group / limit).read_text())
            figures = dict(
                line.split(" ") for line in (group / limit).with_name("memory.stat").read_text().splitlines()
            )
            left.append(most - most // 10 - int((group / used).read_text()) + int(figures[given_back]))
    return min(left)
