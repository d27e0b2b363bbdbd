"""Where a store is made until it is whole, so that an interrupted making continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.base.atomic import require_new
from pretrain.base.errors import DataError
from pretrain.base.files import require_own_folder
from pretrain.base.locks import file_lock


@contextmanager
def unfinished(out: Path, kind: str) -> Iterator[Path]:
    """The folder ``.NAME.kind`` beside the new store ``out``, locked for the block; neither made nor removed here.

    Raises:
        DataError: ``out`` holds something, another process makes it, or the folder is somebody else's.
    """
    require_new(out)
    work, lock = (out.parent / f".{out.name}.{what}" for what in (kind, f"{kind}.lock"))
    require_own_folder(work)
    out.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(lock, refusal=f"{out}: another process {kind}s to it", remove=True, error=DataError):
        yield work
