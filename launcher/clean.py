"""Removes what jobs have left in the memory of this host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from capt.pretrain.engine.run_folder import CONFIG, holds_run, is_active
from capt.pretrain.reliability.local import storage


def clean(runs: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Remove the local checkpoints of ``runs``, or without runs all that are of no more use; yield each.

    Raises:
        ConfigError: a folder holds no run, or a process trains in it.
    """
    if not runs:
        yield from storage.remove_stale(storage.location_of(None))
    for run in runs:
        if not holds_run(run):
            raise ConfigError(f"{run} holds no run")
        if is_active(run):
            raise ConfigError(f"{run}: a process is training in this folder; stop it first")
        (run / storage.INCARNATION).unlink(missing_ok=True)
        job = load_job(run / CONFIG, resolved=True)
        if storage.is_private(own := storage.storage_of(job.checkpoint.local.dir, run)):
            storage.remove(own)
            yield own, "as asked for"
