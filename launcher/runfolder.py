"""What the launcher reads from and leaves in a run folder: is there a run, how did it end, how was it launched."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.engine.run_folder import BAD_INPUT, DONE, FAILED, STOPPED, check_is_free, held
from tokenizer.errors import ConfigError

__all__ = ["BAD_INPUT", "DONE", "FAILED", "STOPPED", "check_is_free", "held"]


def config_of(folder: Path) -> Path:
    """The configuration of the run in ``folder``. Raises ``ConfigError`` when there is no run."""
    config = folder / "config.yaml"
    if not config.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml")
    return config


def check_checkpoint(folder: Path, name: str) -> None:
    """Refuse a checkpoint that the run does not have. Raises ``ConfigError`` naming those it has."""
    found = sorted(path.parent.name for path in (folder / "checkpoints").glob("*/manifest.json"))
    if name not in found:
        have = f"it has {', '.join(found)}" if found else "it has no complete checkpoint"
        raise ConfigError(f"{folder} has no checkpoint {name!r}; {have}")


def write_private(path: Path, text: str) -> None:
    """Write a whole file that only its owner may read, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as f:
        f.write(text)
    temporary.replace(path)


@dataclass(frozen=True)
class StatusWatch:
    """Reads ``status.json``, which rank 0 keeps, and knows whether it was written after the watch began.

    Launchers lose exit codes: torchrun turns each failure into 1, and a killed pdsh makes ``deepspeed`` exit with 0.
    """

    path: Path
    stamp: tuple[int, int] | None

    @classmethod
    def begin(cls, folder: Path) -> StatusWatch:
        """Remember the file as it is now."""
        return cls(folder / "status.json", _stamp(folder / "status.json"))

    def state(self) -> str | None:
        """``running``, ``done``, ``stopped`` or ``failed``; None when no job has written since the watch began."""
        return self._read().get("state")

    def exit_code(self, launcher_code: int) -> int:
        """The job's own exit code, given what the launcher that ran it returned."""
        status = self._read()
        match status.get("state"):
            case "done":
                return DONE if launcher_code == 0 else FAILED
            case "stopped":
                return STOPPED
            case "failed":
                code = status.get("exit_code")
                return code if code in (FAILED, BAD_INPUT) else FAILED
            case _:
                return launcher_code if launcher_code in (BAD_INPUT, STOPPED) else FAILED

    def _read(self) -> dict[str, Any]:
        if _stamp(self.path) == self.stamp:
            return {}
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_ino
