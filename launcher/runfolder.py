"""How a job ended, as its run folder tells it; and what is written there when the job could not say so itself."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pretrain.base.errors import ConfigError, UserError
from pretrain.base.files import write_text
from pretrain.engine.metrics_file import METRICS, read_metrics
from pretrain.engine.run_folder import (
    BAD_INPUT,
    DONE,
    FAILED,
    STATUS,
    STOPPED,
    Status,
    check_is_free,
    discard_refused,
    held,
    holds_run,
    is_held,
    read_status,
    write_status,
)

__all__ = ["BAD_INPUT", "DONE", "FAILED", "STOPPED", "StatusWatch", "Traces", "check_is_free", "held", "write_private"]


def write_private(path: Path, text: str) -> None:
    """Write a whole file that only its owner may read, creating its folder."""
    write_text(path, text, private=True)


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
        status = self._written()
        return status.state if status else None

    def exit_code(self, launcher_code: int) -> int:
        """The job's own exit code, given what the launcher that ran it returned."""
        status = self._written()
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

    def settle(self, code: int, reason: str) -> None:
        """The job's processes are gone: where its status still says that they run, write how they ended.

        What a job that is alive has written is left alone.
        """
        status = _status(self.folder)
        if status is None or status.state not in ("starting", "running"):
            return
        if self._written() is None and is_held(self.folder):  # another job's, and that one lives
            return
        state = "stopped" if code == STOPPED else "failed"
        truth = {"state": state, "exit_code": code, "reason": reason, "step": step_reached(self.folder)}
        with suppress(OSError):  # a full disk must not hide what went wrong
            write_status(self.folder, Status.model_validate({**status.model_dump(), **truth}))

    def _written(self) -> Status | None:
        return None if _stamp(self.folder / STATUS) == self.stamp else _status(self.folder)


class Traces:
    """What a launch leaves in and above a run folder, to be removed when its job was refused, or never began."""

    def __init__(self, folder: Path, files: Iterable[Path]) -> None:
        self._folder, self._files = folder, tuple(files)
        self._new = [path for path in (folder, *folder.parents) if not path.exists()]

    def remove(self) -> None:
        """Remove them; nothing happens to a folder that holds a run."""
        if holds_run(self._folder):
            return
        with suppress(OSError):  # what went wrong is another error, and somebody else's file keeps a folder
            for path in self._files:
                path.unlink(missing_ok=True)
            discard_refused(self._folder)
            for path in self._new:
                path.rmdir()


def step_reached(folder: Path) -> int:
    """The newest step that a run tells of, in its status or in its metrics: one that was killed wrote no status."""
    steps = [0]
    with suppress(UserError, OSError):
        steps += [status.step] if (status := read_status(folder)) else []
    with suppress(UserError, OSError):
        metrics = read_metrics(folder / METRICS)
        steps += [row.step for row in (*metrics.training[-1:], *metrics.validation[-1:])]
    return max(steps)


def _status(folder: Path) -> Status | None:
    with suppress(ConfigError, OSError):
        return read_status(folder)
    return None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_ino
