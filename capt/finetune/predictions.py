"""Result files as a benchmark's server takes them: written only after their own validator has accepted them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import replacing


def write_checked(out: Path, write: Callable[[IO[bytes]], None], check: Callable[[Path], list[str]]) -> Path:
    """Write a result file, check it, and only then put it at ``out``.

    Args:
        out: the file to make; an older one is replaced.
        write: writes the predictions into the open file.
        check: the format's validator: what the benchmark would refuse in a file, one line for each problem.

    Raises:
        DataError: the validator found problems; nothing is written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as (file, temporary):
        write(file)
        file.flush()
        if problems := check(temporary):
            raise DataError(f"{out} was not written: {'; '.join(problems)}")
    return out
