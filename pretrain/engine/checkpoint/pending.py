"""A checkpoint that is being written: it is either complete, or it is not there.

Every rank writes its files into a temporary folder, makes them durable and hashes them, with ``checkpoint.async`` in a
thread of its own. At the commit rank 0 gathers the hashes, writes the manifest last and renames the folder into place.
A failure on any rank (a full disk) fails the save on all ranks, removes what was written, and leaves the previous
checkpoint as it was.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pretrain.base import distributed
from pretrain.base.atomic import sync
from pretrain.base.files import public_mode, write_json
from pretrain.base.hashing import sha256
from pretrain.engine.checkpoint.folders import point, put_in_place, sync_tree
from pretrain.engine.checkpoint.manifest import MANIFEST, STATE
from pretrain.engine.durable import write_error, write_tensors

logger = logging.getLogger(__name__)

TensorFiles = dict[str, dict[str, Tensor]]


class PendingSave:
    """A checkpoint being written by this rank; ``commit`` (collective) makes it real.

    Args:
        target: the checkpoint's folder.
        files: tensors that this rank writes, by file name.
        metadata: ``state.json``.
        manifest: ``manifest.json`` but for its list of files.
        token: makes the name of the temporary folder this save's own, so that a rank of an earlier job, which is not
            yet dead, cannot write into it.
    """

    def __init__(
        self, target: Path, files: TensorFiles, metadata: dict[str, Any], manifest: dict[str, Any], token: str = ""
    ) -> None:
        self.target = target
        self.temporary = target.with_name(f".{target.name}{token and '.'}{token}.partial")
        self.ready: list[str] = []
        """Names of further files of this rank that are written already."""
        self._files = files
        self.metadata = metadata
        self.manifest = manifest
        self.hashed: dict[str, dict[str, Any]] = {}
        self._mode = public_mode()
        self.leads = distributed.rank() == 0
        """Whether this rank makes the folder, and clears it away after a failure."""
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def write(self, *, asynchronous: bool) -> None:
        """Write and hash this rank's files, in a background thread when ``asynchronous`` (the tensors are copies)."""
        if asynchronous:
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()

    def _write(self) -> None:
        try:
            if distributed.rank() == 0:
                write_json(self.temporary / STATE, self.metadata)
                self.ready.append(STATE)
            for name in self.ready:
                self.seal(name)
            while self._files:
                name, tensors = self._files.popitem()
                write_tensors(self.temporary / name, tensors, {"format": "pt"})
                del tensors
                self.seal(name)
        except OSError as error:  # a network file system says that it is full when a file is made durable
            self._error = write_error(self.temporary, error)
            self._files = {}
        except Exception as error:
            self._error = error
            self._files = {}

    def seal(self, name: str) -> None:
        """Make a file of this rank durable, and note its size and digest."""
        path = self.temporary / name
        path.chmod(self._mode)  # safetensors writes for the owner alone
        sync(path)
        self.hashed[name] = {"size": path.stat().st_size, "sha256": sha256(path)}

    def done(self) -> bool:
        """True when this rank has nothing left to write."""
        return self._thread is None or not self._thread.is_alive()

    def commit(self) -> Path:
        """Wait for all ranks' files, write the manifest, rename. Collective. What it returns lasts.

        Raises:
            CheckpointError: a rank could not write; nothing of this checkpoint is left.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            with distributed.synchronize_errors(patient=True):  # a rank may write for longer than a collective may wait
                if self._error is not None:
                    raise self._error
            self.complete()
        except Exception:
            if self.leads:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise
        return self.target

    def complete(self) -> None:
        """Make a checkpoint of what all ranks have written. Collective."""
        hashed = distributed.gather_objects(self.hashed)
        self.replicate(hashed)
        with distributed.synchronize_errors():
            if self.leads:
                self._finish({name: record for each in hashed for name, record in each.items()})

    def replicate(self, by_rank: Sequence[dict[str, dict[str, Any]]]) -> None:
        """Copy the files of all ranks, with size and digest, to where else they belong. Collective."""

    def _finish(self, files: dict[str, dict[str, Any]]) -> None:
        folder = self.temporary
        try:
            write_json(folder / MANIFEST, {**self.manifest, "files": files})
            sync_tree(folder)
            put_in_place(folder, self.target)  # there may be an earlier save of this step, or a folder without manifest
        except OSError as error:
            raise write_error(folder, error) from error
        try:
            point("latest", self.target)
        except OSError as error:  # the checkpoint is there all the same
            logger.warning("%s: the link latest still leads to an earlier checkpoint: %s", self.target, error)
