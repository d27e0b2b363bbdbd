"""The calls of a process that change a file system: counted, told, and cut short by a death before any one of them."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.engine import durable

_CHANGING = os.O_CREAT | os.O_TRUNC


class Death(BaseException):
    """The process is gone. No handler for errors catches it, and nothing that follows it changes a file any more."""


Told = Callable[[str, str, str], None]
"""Called after each call with its name and path; then where to (``rename``), or what a link leads to (``symlink``)."""


class Calls:
    """Replaces the functions of ``os`` and ``open`` within a folder."""

    def __init__(self, folder: Path, told: Told | None = None, death_before: int | None = None) -> None:
        self._folder, self._told, self._death = str(folder), told, death_before
        self.count = 0

    @contextmanager
    def watched(self) -> Iterator[Calls]:
        """While active, calls that change something below the folder are seen."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("mkdir", "rmdir", "unlink", "remove"):
                patch.setattr(os, name, self._on_one(name, getattr(os, name)))
            for name in ("rename", "replace"):
                patch.setattr(os, name, self._on_two(getattr(os, name)))
            patch.setattr(os, "symlink", self._symlink(os.symlink))
            patch.setattr(os, "fsync", self._fsync(os.fsync))
            patch.setattr(os, "open", self._open(os.open))
            opened = self._builtin_open(io.open)
            patch.setattr(io, "open", opened)
            patch.setattr(builtins, "open", opened)
            patch.setattr(durable, "save_file", self._save_file(durable.save_file))  # Rust opens the file itself
            yield self

    def _path(self, path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int):
            found = os.readlink(f"/proc/self/fd/{path}")
        else:
            base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
            found = os.path.normpath(os.path.join(base, os.fspath(path)))
        return found if found == self._folder or found.startswith(f"{self._folder}/") else None

    def _do(self, name: str, path: str | None, other: str, call: Callable[[], Any]) -> Any:
        if path is None:
            return call()
        if self._death is not None and self.count >= self._death:
            raise Death(f"before call {self.count}: {name} {path}")
        result = call()
        self.count += 1
        if self._told is not None:
            self._told(name, path, other)
        return result

    def _on_one(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            known = "unlink" if name == "remove" else name
            return self._do(known, self._path(path, kwargs.get("dir_fd")), "", lambda: real(path, *args, **kwargs))

        return call

    def _on_two(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **kwargs: Any) -> Any:
            place = self._path(target, kwargs.get("dst_dir_fd")) or ""
            return self._do(
                "rename", self._path(source, kwargs.get("src_dir_fd")), place, lambda: real(source, target, **kwargs)
            )

        return call

    def _symlink(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            return self._do("symlink", self._path(target), str(source), lambda: real(source, target, *args, **kwargs))

        return call

    def _fsync(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda descriptor: self._do("fsync", self._path(descriptor), "", lambda: real(descriptor))

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            place = self._path(path, kwargs.get("dir_fd")) if flags & _CHANGING else None
            return self._do("create", place, "", lambda: real(path, flags, *args, **kwargs))

        return call

    def _builtin_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            place = None if isinstance(file, int) or not set("wxa+") & set(mode) else self._path(file)
            return self._do("create", place, "", lambda: real(file, mode, *args, **kwargs))

        return call

    def _save_file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensors: Any, path: Path, **kwargs: Any) -> Any:
            place = self._path(path)
            self._do("create", place, "", lambda: path.write_bytes(b"half"))
            return self._do("create", place, "", lambda: real(tensors, path, **kwargs))

        return call
