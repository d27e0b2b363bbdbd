"""Checks whether all hosts of a job see the same folder."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from pathlib import Path

from pretrain.base import distributed
from pretrain.base.errors import ConfigError, user_text
from pretrain.base.files import write_text

_PATIENCE = 5.0
"""Seconds after which a file that one host has written must be seen by the others."""


def check_is_shared(folder: Path) -> None:
    """Every host writes a file into ``folder`` and must see the one of rank 0. Collective.

    Raises:
        ConfigError: the folder is not on a file system that the hosts share, or a host cannot write there; it is named.
    """
    if distributed.world_size() == 1:
        return
    token = distributed.broadcast_object(secrets.token_hex(4))
    speaks = distributed.rank() == 0 or distributed.local_rank() == 0
    mine = folder / f".shared-{token}-{distributed.rank()}"
    problem = None
    try:
        if speaks and folder.is_dir():
            write_text(mine, "")
    except OSError as error:
        problem = user_text(error)
    try:
        distributed.barrier()
        blind = speaks and not _sees(folder / f".shared-{token}-0")
        found = distributed.gather_objects((socket.gethostname(), problem, blind))
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
    with distributed.synchronize_errors():
        _refuse_unshared(folder, found)


def _sees(path: Path) -> bool:
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _refuse_unshared(folder: Path, found: list[tuple[str, str | None, bool]]) -> None:
    for rank, (host, problem, _) in enumerate(found):
        if problem is not None:
            raise ConfigError(f"run.dir {folder}: {host} (rank {rank}) cannot write there: {problem}")
    blind = [f"{host} (rank {rank})" for rank, (host, _, unseen) in enumerate(found) if unseen]
    if blind:
        more = f" and {len(blind) - 8} more" if len(blind) > 8 else ""
        raise ConfigError(
            f"run.dir {folder.absolute()}: not shared: what {found[0][0]} (rank 0) writes there is not seen on "
            f"{', '.join(blind[:8])}{more}; name a folder on a file system that all hosts mount"
        )
