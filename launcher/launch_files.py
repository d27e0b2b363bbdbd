"""The files that a launch writes into a run folder, and their removal when its job was refused or never began."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pretrain.base.errors import UserError
from pretrain.base.files import read_text, write_text
from pretrain.engine.run_folder import discard_refused, holds_run, is_active


class LaunchFiles:
    """Files of a launch, by path; all are private, because a job may hold paths and names of its user."""

    def __init__(self, folder: Path, files: Mapping[Path, str]) -> None:
        self._folder, self._files = folder, files
        self._new = [path for path in (folder, *folder.parents) if not path.exists()]
        self._before = {path: text for path in files if (text := _text(path)) is not None}
        self._others = frozenset(path for path, text in self._before.items() if text == files[path])

    def write(self) -> None:
        """Write the files and create their folders."""
        for path, text in self._files.items():
            write_text(path, text, private=True)

    def remove(self, *, refused: bool = False) -> None:
        """Remove the files and the new folders; nothing happens to a folder that holds a run.

        A file that was there already with the same text stays: a job of the same configuration, which waits in the
        queue of a cluster or whose ranks are starting, is going to read it. Where a job was ``refused`` because another
        one trains in the folder, that one's files are put back: ``capt resume`` launches it as they say.
        """
        if holds_run(self._folder):
            if refused and is_active(self._folder):
                with suppress(OSError):
                    for path in self._before.keys() - self._others:
                        write_text(path, self._before[path], private=True)
            return
        with suppress(OSError):  # what went wrong is another error, and somebody else's file keeps a folder
            for path in self._files.keys() - self._others:
                path.unlink(missing_ok=True)
            if not self._others:
                discard_refused(self._folder)
            for path in self._new:
                path.rmdir()


def _text(path: Path) -> str | None:
    with suppress(OSError, UserError):
        return read_text(path)
    return None


def job_file(folder: Path, text: str) -> Path:
    """Where the merged job of a launch lies in its run folder.

    The name depends on the content, so that a second launch into the same folder, which is going to be refused, does
    not change the job of the first one before its ranks have read it.
    """
    return folder / f"job-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
