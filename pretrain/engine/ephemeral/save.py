"""An ephemeral checkpoint that is being written: every host has a folder, and gets the files of the host before it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pretrain.base import distributed
from pretrain.base.atomic import sync
from pretrain.base.files import write_json
from pretrain.engine.checkpoint.folders import remove_checkpoint
from pretrain.engine.checkpoint.layout import checkpoints_of
from pretrain.engine.checkpoint.manifest import MANIFEST, STATE
from pretrain.engine.checkpoint.pending import PendingSave, TensorFiles
from pretrain.engine.durable import write_error
from pretrain.engine.ephemeral.hosts import Hosts
from pretrain.engine.ephemeral.transfer import Move, move_files

logger = logging.getLogger(__name__)


class EphemeralSave(PendingSave):
    """A save to a folder of each host, with a copy on the next host.

    All hosts have the new checkpoint before any removes the one before it: at every moment one is whole.
    """

    def __init__(
        self, target: Path, files: TensorFiles, metadata: dict[str, Any], manifest: dict[str, Any], token: str, *,
        hosts: Hosts,
    ) -> None:  # fmt: skip
        super().__init__(target, files, metadata, manifest, token)
        self._hosts = hosts
        self.leads = hosts.leads
        self.held = 0
        """Bytes of the checkpoint on this host, once it is complete."""

    def complete(self) -> None:
        """Make a checkpoint of what all ranks have written, on every host. Collective."""
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                self._write_json(STATE, self.metadata)
                self.seal(STATE)
        by_rank = distributed.gather_objects(self.hashed)
        moves = [
            Move(rank, keeper, tuple((name, int(record["size"])) for name, record in sorted(files.items())))
            for rank, files in enumerate(by_rank)
            if (keeper := self._hosts.keeper(rank)) is not None
        ]
        move_files(self.temporary, moves)
        of = self._hosts.of
        here = [rank for rank in range(len(by_rank)) if of[rank] == self._hosts.mine]
        here += [move.source for move in moves if of[move.target] == self._hosts.mine]
        self.held = sum(int(record["size"]) for rank in here for record in by_rank[rank].values())
        with distributed.synchronize_errors():
            if self.leads:
                self._put_in_place({name: record for files in by_rank for name, record in files.items()})
        if self.leads:
            for old in checkpoints_of(self.target.parent.parent):
                if old != self.target:
                    remove_checkpoint(old)

    def _write_json(self, name: str, value: Any) -> None:
        try:
            write_json(self.temporary / name, value)
        except OSError as error:
            raise write_error(self.temporary, error) from error

    def _put_in_place(self, files: dict[str, dict[str, Any]]) -> None:
        self._write_json(MANIFEST, {**self.manifest, "files": files})
        try:
            sync(self.temporary)
            if self.target.exists():
                remove_checkpoint(self.target)
            self.temporary.rename(self.target)
        except OSError as error:
            raise write_error(self.temporary, error) from error
