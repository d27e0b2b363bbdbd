"""A store of ``fsspec`` that lies: a folder of this host under ``faulty://``, with faults that a test injects."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from capt.pretrain.base import stores

Fault = Callable[[str, bytes], bytes]
"""Change of the bytes of a request; it may raise, or take its time."""


class FaultyStore(LocalFileSystem):
    protocol = "faulty"
    cachable = False
    faults: ClassVar[list[Fault]] = []
    requests: ClassVar[list[str]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, auto_mkdir=True)  # a store has no folders that are made

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("faulty:").strip("/")

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(self._strip_protocol(path) if isinstance(path, str) else path, **options)
        return found | {"ETag": f"{found['ino']}-{found['mtime']}"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.requests.append(os.path.basename(path))
        content: bytes = super().cat_file(path, start=start, end=end, **options)
        return self.faults.pop(0)(path, content) if self.faults else content


def server_error(path: str, content: bytes) -> bytes:
    raise OSError("503 Slow Down at https://user:hunter2@store/x?X-Amz-Signature=abcdef")


def truncated(path: str, content: bytes) -> bytes:
    return content[: len(content) // 2]


def damaged(path: str, content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def slow(path: str, content: bytes) -> bytes:
    time.sleep(1.0)
    return content


def expired(path: str, content: bytes) -> bytes:
    raise PermissionError("The provided token has expired.")


def replaced(path: str, content: bytes) -> bytes:
    os.utime(path, (1, 1))
    return content


@contextmanager
def faulty_store() -> Iterator[type[FaultyStore]]:
    """The store, with short pauses and time limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stores.STORES, "faulty", ("fsspec", "train"))
        patch.setattr(stores, "_FIRST_PAUSE", 0.001)
        patch.setattr(stores, "TIMEOUT", 0.3)
        patch.setattr(stores, "ATTEMPTS", 3)
        fsspec.register_implementation("faulty", FaultyStore, clobber=True)
        patch.setattr(FaultyStore, "faults", [])
        patch.setattr(FaultyStore, "requests", [])
        yield FaultyStore
