"""A disk as strict as POSIX lets it be: what a crash of the host leaves is what was made durable, and perhaps more.

The bytes of a file last after ``fsync`` of the file, and its name after ``fsync`` of the folder. Of the changes of
names since then a crash leaves any first part, in each folder by itself. A name may last longer than the bytes, which
are then none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Union


class File:
    """A file: its bytes as they last."""

    def __init__(self) -> None:
        self.durable = b""


class Folder:
    """A folder: the names as they last, and the changes since."""

    def __init__(self) -> None:
        self.durable: dict[str, Entry] = {}
        self.changes: list[dict[str, Entry | None]] = []

    def after(self, count: int) -> dict[str, Entry]:
        """The names after the first ``count`` changes."""
        names: dict[str, Entry | None] = dict(self.durable)
        for change in self.changes[:count]:
            names.update(change)
        return {name: entry for name, entry in names.items() if entry is not None}

    def now(self) -> dict[str, Entry]:
        """The names as the process sees them."""
        return self.after(len(self.changes))


Entry = Union[File, Folder, str]  # noqa: UP007 - of classes that are named before
"""Target of a name; a text is a link that leads there."""


class Disk:
    """Follows the calls of a process below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root, self.top = root, Folder()

    def _folder(self, path: str) -> tuple[Folder, str]:
        *parents, name = PurePosixPath(path).relative_to(self._root).parts
        folder = self.top
        for part in parents:
            inner = folder.now()[part]
            assert isinstance(inner, Folder), path
            folder = inner
        return folder, name

    def tell(self, call: str, path: str, other: str) -> None:
        """Take a call that was made."""
        if path == str(self._root):
            assert call == "fsync", call
            self._sync(self.top, path)
            return
        folder, name = self._folder(path)
        match call:
            case "create":
                if name not in folder.now():
                    folder.changes.append({name: File()})
            case "mkdir":
                folder.changes.append({name: Folder()})
            case "symlink":
                folder.changes.append({name: other})
            case "unlink" | "rmdir":
                folder.changes.append({name: None})
            case "rename":
                target, new = self._folder(other)
                moved = folder.now()[name]
                if target is folder:
                    folder.changes.append({name: None, new: moved})
                else:
                    target.changes.append({new: moved})
                    folder.changes.append({name: None})
            case "fsync":
                self._sync(folder.now()[name], path)

    def _sync(self, entry: Entry, path: str) -> None:
        if isinstance(entry, File):
            entry.durable = Path(path).read_bytes()
        elif isinstance(entry, Folder):
            entry.durable, entry.changes = entry.now(), []

    def crashes(self) -> Iterator[dict[int, int]]:
        """Ways to crash: how many of its changes each folder keeps. One varies; the others keep none, or all."""
        changed = [folder for folder in self._folders(self.top) if folder.changes]
        for others in (0, 1):
            kept = {id(folder): others * len(folder.changes) for folder in changed}
            yield kept
            for folder in changed:
                for count in range(len(folder.changes) + 1):
                    yield {**kept, id(folder): count}

    def _folders(self, folder: Folder) -> Iterator[Folder]:
        yield folder
        entries = [*folder.durable.values(), *(each for change in folder.changes for each in change.values())]
        for entry in {id(each): each for each in entries}.values():
            if isinstance(entry, Folder):
                yield from self._folders(entry)

    def tree(self, kept: dict[int, int]) -> tuple[tuple[str, str | bytes | None], ...]:
        """State after a crash: each path with a file's bytes, a link's text, or None for a folder."""
        return tuple(self._tree(self.top, "", kept))

    def _tree(self, folder: Folder, base: str, kept: dict[int, int]) -> Iterator[tuple[str, str | bytes | None]]:
        for name, entry in sorted(folder.after(kept.get(id(folder), 0)).items()):
            if isinstance(entry, Folder):
                yield f"{base}{name}", None
                yield from self._tree(entry, f"{base}{name}/", kept)
            else:
                yield f"{base}{name}", entry.durable if isinstance(entry, File) else entry


def lay_out(tree: tuple[tuple[str, str | bytes | None], ...], place: Path) -> None:
    """Make the files of a tree in an empty folder."""
    place.mkdir(parents=True)
    for name, content in tree:
        path = place / name
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
