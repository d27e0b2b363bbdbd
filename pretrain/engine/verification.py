"""Verification of files by all ranks together (``capt.pretrain.base.verification``), over the job's process group."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import UserError
from capt.pretrain.base.verification import ExpectedFile, Ranks, Verifier


def all_ranks() -> Ranks:
    """The ranks of the process group; this process alone without one."""
    return Ranks(distributed.rank(), distributed.gather_objects, partial(distributed.synchronize_errors, patient=True))


def verify_files(folder: Path, files: Mapping[str, ExpectedFile], *, error: type[UserError], hint: str = "") -> None:
    """Compare files of ``folder`` with their records, each read by one rank, whatever this host remembers.

    Collective: all ranks call it with the same files.

    Raises:
        UserError: of the class ``error``, on all ranks, naming the first file that is missing or differs; ``hint`` is
            the end of the message.
    """
    Verifier(ranks=all_ranks(), again=True).verify(folder, files, error=error, hint=hint)
