"""The files that a launch writes into a run folder, and their removal when its job was refused or never began."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pretrain.base.files import write_text
from pretrain.engine.run_folder import discard_refused, holds_run


class LaunchFiles:
    """Files of a launch, by path; all are private, because a job may hold paths and names of its user."""

    def __init__(self, folder: Path, files: Mapping[Path, str]) -> None:
        self._folder, self._files = folder, files
        self._new = [path for path in (folder, *folder.parents) if not path.exists()]

    def write(self) -> None:
        """Write the files and create their folders."""
        for path, text in self._files.items():
            write_text(path, text, private=True)

    def remove(self) -> None:
        """Remove the files and the new folders; nothing happens to a folder that holds a run."""
        if holds_run(self._folder):
            return
        with suppress(OSError):  # what went wrong is another error, and somebody else's file keeps a folder
            for path in self._files:
                path.unlink(missing_ok=True)
            discard_refused(self._folder)
            for path in self._new:
                path.rmdir()


def job_file(folder: Path, text: str) -> Path:
    """Where the merged job of a launch lies in its run folder.

    The name depends on the content, so that a second launch into the same folder, which is going to be refused, does
    not change the job of the first one before its ranks have read it.
    """
    return folder / f"job-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
