"""Finds how a job ended by its run folder, and writes there what the job could not write itself."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine.run_folder import (
    BAD_INPUT,
    DONE,
    FAILED,
    STATUS,
    STOPPED,
    Status,
    is_active,
    last_step,
    read_status,
    write_status,
)


@dataclass(frozen=True)
class StatusWatch:
    """Reads ``status.json``, which rank 0 keeps, and knows whether it was written after the watch began.

    Launchers lose exit codes: torchrun turns each failure into 1, and a killed pdsh makes ``deepspeed`` exit with 0.
    """

    folder: Path
    stamp: tuple[int, int] | None

    @classmethod
    def begin(cls, folder: Path) -> StatusWatch:
        """Remember the file as it is now."""
        return cls(folder, _stamp(folder / STATUS))

    def state(self) -> str | None:
        """The job's state (``Status``); None when no job has written since the watch began."""
        status = self._new_status()
        return status.state if status else None

    def exit_code(self, launcher_code: int) -> int:
        """The job's own exit code, given the exit code of the launcher that ran it."""
        status = self._new_status()
        match status.state if status else None:
            case "done":
                return DONE if launcher_code == 0 else FAILED
            case "stopped":
                return STOPPED
            case "failed":
                code = status.exit_code if status else None
                return BAD_INPUT if code == BAD_INPUT else FAILED
            case _:
                return launcher_code if launcher_code in (BAD_INPUT, STOPPED) else FAILED

    def record_end(self, code: int, reason: str) -> None:
        """Write how the job ended, if its processes are gone and its status still says that they run.

        The status of a job that is alive is left as it is.
        """
        status = _read(self.folder)
        if status is None or status.state not in ("starting", "running"):
            return
        if self._new_status() is None and is_active(self.folder):  # the status of another job, which is alive
            return
        state = "stopped" if code == STOPPED else "failed"
        end = {"state": state, "exit_code": code, "reason": reason, "step": last_step(self.folder)}
        with suppress(OSError):  # a full disk must not hide what went wrong
            write_status(self.folder, Status.model_validate({**status.model_dump(), **end}))

    def _new_status(self) -> Status | None:
        return None if _stamp(self.folder / STATUS) == self.stamp else _read(self.folder)


def _read(folder: Path) -> Status | None:
    with suppress(ConfigError, OSError):
        return read_status(folder)
    return None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_ino
