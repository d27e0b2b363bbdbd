"""What a launcher and a rank must agree on: the exit codes, and when a folder is taken. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from tokenizer.errors import ConfigError

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
