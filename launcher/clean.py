"""Removes what jobs have left in the memory of this host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrain.base.errors import ConfigError
from pretrain.config.load import load_job
from pretrain.engine.ephemeral.places import LIFE, folder_of, is_private, places, remove, remove_stale
from pretrain.engine.run_folder import CONFIG, holds_run, is_active


def clean(runs: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Remove the ephemeral checkpoints of ``runs``, or without runs all that are of no more use; yields each.

    Raises:
        ConfigError: a folder holds no run, or a process trains in it.
    """
    if not runs:
        yield from remove_stale(places(None))
    for run in runs:
        if not holds_run(run):
            raise ConfigError(f"{run} holds no run")
        if is_active(run):
            raise ConfigError(f"{run}: a process is training in this folder; stop it first")
        (run / LIFE).unlink(missing_ok=True)
        for place in places(load_job(run / CONFIG, resolved=True).checkpoint.ephemeral.dir):
            folder = folder_of(place, run)
            if is_private(folder):
                remove(folder)
                yield folder, "as asked for"
