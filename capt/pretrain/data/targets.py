"""Targets of prepared shard sets: a folder, or one in a store. The manifest of a set comes last."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from capt.pretrain.base.atomic import rename_to_new, require_new
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.records import Record
from capt.pretrain.base.stores import (
    MissingError,
    StoreFile,
    chunks,
    exists,
    look_up,
    put_bytes,
    put_file,
    remove_tree,
    tree,
    without_secrets,
)
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.card import CARD
from capt.pretrain.data.shard_writer import trust_written
from capt.pretrain.data.shards import MANIFEST, ShardFile, ShardManifest, ShardSet
from capt.pretrain.data.sources import Split
from capt.pretrain.data.units import PreparationPlan

_NAME = re.compile(r"shard-[0-9]{5,9}\.bin|documents\.bin|manifest\.json")
_TRIED = ".capt-writes"
"""An empty file that is written to see whether that is possible."""


class WrittenFile(Record, extra="forbid"):
    """A file of a shard set that is in its place; ``tag`` is what the store calls this version of it."""

    file: ShardFile
    tag: str = ""


def target_of(plan: PreparationPlan) -> FolderTarget:
    """The target of the shard sets of a plan."""
    return FolderTarget(plan) if plan.store is None else StoreTarget(plan, plan.store)


class FolderTarget:
    """A folder. Its sets are gathered elsewhere on its disk, in folders ``gathered``, and appear by a rename."""

    def __init__(self, plan: PreparationPlan) -> None:
        self.plan, self._check = plan, plan.data.verify != "never"

    def place(self, split: Split) -> str:
        """The name of the place of a set."""
        return str(self.plan.out / split)

    def require_free(self, split: Split) -> None:
        """Raise ``DataError`` if something that is no shard set is in the place of a set."""
        folder = self.plan.out / split
        try:
            require_new(folder)
        # A set that is there is no error here: its key is compared later.
        except DataError:
            if not (folder / MANIFEST).is_file():
                raise

    def manifest(self, split: Split) -> ShardManifest | None:
        """The manifest of a set that is there. Raises ``DataError``."""
        folder = self.plan.out / split
        return ShardManifest.read(folder) if (folder / MANIFEST).is_file() else None

    def open(self, split: Split, verifier: Verifier, *, is_new: bool) -> ShardSet:
        """Open a set that is there, with a look at its files. Raises ``DataError``."""
        folder = self.plan.out / split
        if is_new:
            trust_written(folder, verifier)
        return ShardSet.open(folder, verifier, verify=self._check)

    def take(self, split: Split, path: Path, record: ShardFile, gathered: Path) -> WrittenFile:
        """Move a file that no other process knows of into its set."""
        os.replace(path, gathered / path.name)
        return WrittenFile(file=record)

    def lost(self, split: Split, files: Mapping[str, WrittenFile]) -> list[str]:
        """The names of files that were taken, and have other bytes by now."""
        return []

    def finish(self, split: Split, manifest: Path, gathered: Path) -> None:
        """Have a set, all of whose files were taken, appear. Raises ``DataError``."""
        manifest.replace(gathered / MANIFEST)
        rename_to_new(gathered, self.plan.out / split)

    def put_card(self, made: Path) -> None:
        """Move the data card from the folder ``made`` to its place."""
        for name in CARD:
            (made / name).replace(self.plan.out / name)


class StoreTarget(FolderTarget):
    """The folder ``url`` of a store. Each file goes there when it is complete, and is read again and compared."""

    def __init__(self, plan: PreparationPlan, url: str) -> None:
        super().__init__(plan)
        self._url = url.rstrip("/")

    def place(self, split: Split) -> str:
        """The address of a set, as messages show it."""
        return without_secrets(f"{self._url}/{split}")

    def require_free(self, split: Split) -> None:
        """Also refuse a store that cannot be written to, before hours of work go into it."""
        folder = f"{self._url}/{split}"
        for file in tree(folder):
            if not _NAME.fullmatch(file.url.removeprefix(f"{folder}/")):
                raise DataError(f"{file} is where the shards go: name another address, or remove it")
        # Once a run, and not where all is there already.
        if split == self.plan.splits[0] and self.manifest(split) is None:
            put_bytes(b"", f"{self._url}/{_TRIED}")
            with suppress(DataError):  # a role of the host may write and not remove
                remove_tree(f"{self._url}/{_TRIED}")

    def manifest(self, split: Split) -> ShardManifest | None:
        """The manifest of a set that is in the store. Raises ``DataError``."""
        folder = f"{self._url}/{split}"
        return ShardManifest.read_url(folder) if exists(f"{folder}/{MANIFEST}") else None

    def open(self, split: Split, verifier: Verifier, *, is_new: bool) -> ShardSet:
        """Open a set in the store; nothing but its manifest is fetched. Raises ``DataError``."""
        # One shard at a time and no limit: nothing is fetched but the manifest.
        return ShardSet.open_url(f"{self._url}/{split}", self.plan.data.cache, sys.maxsize, at_once=1)

    def take(self, split: Split, path: Path, record: ShardFile, gathered: Path) -> WrittenFile:
        """Move a file to the store. Raises ``DataError`` where that fails, or the store gives back other bytes."""
        url = f"{self._url}/{split}/{path.name}"
        put_file(path, url)
        # Read back: a store may accept what it does not keep.
        file = look_up(url)
        if not self._holds(file, record):
            raise DataError(
                f"{file}: the store holds other bytes than were written there; run the same command again, what is "
                "finished is kept"
            )
        path.unlink()
        return WrittenFile(file=record, tag=file.tag)

    def _holds(self, file: StoreFile, record: ShardFile) -> bool:
        if file.size != record.bytes or not self._check:
            return file.size == record.bytes
        digest = sha256()
        for chunk in chunks(file):
            digest.update(chunk)
        return digest.hexdigest() == record.sha256

    def lost(self, split: Split, files: Mapping[str, WrittenFile]) -> list[str]:
        """Find the files of a set that changed. Raises ``DataError`` where it has files that were not taken."""
        folder = f"{self._url}/{split}"
        found = {file.url.removeprefix(f"{folder}/"): file for file in tree(folder)}
        for name in found.keys() - files.keys() - {MANIFEST}:
            raise DataError(f"{found[name]} belongs to another preparation: remove it, and run the same command again")
        return [name for name, written in files.items() if not self._is_kept(found.get(name), written)]

    def _is_kept(self, file: StoreFile | None, written: WrittenFile) -> bool:
        if file is None:
            return False
        # The store's tag is as it was after the upload: no byte need be read.
        if (file.size, file.tag) == (written.file.bytes, written.tag):
            return True
        try:
            return self._holds(file, written.file)  # a process that was taken for dead has written the same again
        except MissingError:
            return False

    def finish(self, split: Split, manifest: Path, gathered: Path) -> None:
        """Put the manifest into the store. Raises ``DataError``."""
        put_file(manifest, f"{self._url}/{split}/{MANIFEST}")

    def put_card(self, made: Path) -> None:
        """Put the data card into the store. Raises ``DataError``."""
        for name in CARD:
            put_file(made / name, f"{self._url}/{name}")
