"""What a launcher and a rank must agree on: the exit codes, and when a folder is taken. Imports no torch."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizer.errors import ConfigError

logger = logging.getLogger(__name__)

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75

_RUN_MARKS = ("config.yaml", "metrics.jsonl", "checkpoints")


def check_is_free(folder: Path) -> None:
    """Refuse a folder that already holds a run. Raises ``ConfigError``."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir {folder} is a file; name a folder")
    if any((folder / mark).exists() for mark in _RUN_MARKS):
        raise ConfigError(
            f"run.dir {folder} already holds a run; continue it with 'capt resume {folder}' or name another folder"
        )


@contextmanager
def held(folder: Path, name: str, refusal: str) -> Iterator[None]:
    """Hold ``folder`` by a lock on its file ``name``, which the kernel frees when this process dies.

    Raises:
        ConfigError: ``refusal``, when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(refusal) from None
        except OSError as error:  # a network file system without locks
            logger.warning("%s cannot be locked (%s): see to it that nobody else uses it", folder, error.strerror)
        yield
