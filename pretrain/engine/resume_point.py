"""Chooses the checkpoint that a run continues from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.checkpoint import checkpoints_of, find_checkpoint, verify_together
from capt.pretrain.engine.checkpoint.layout import point, set_aside
from capt.pretrain.engine.loop import Callback

logger = logging.getLogger(__name__)

_PATIENCE = 90.0
"""Seconds after which ranks must see the same checkpoints: NFS keeps the entries of a folder for up to a minute."""
_PAUSE = 1.0


def choose_checkpoint(
    job: Job, name: str | None = None, callbacks: Sequence[Callback] = (), *, skip_damaged: bool = False
) -> Path | None:
    """Return the checkpoint to resume from, verified; None for a run that ended before its first one. Collective.

    Args:
        job: of the run.
        name: of a checkpoint in the run folder. Without it the newest one is taken, be it there or of a callback.
        callbacks: may know newer checkpoints elsewhere (`Callback.find_checkpoint`).
        skip_damaged: rename damaged ones to ``damaged-step-...`` as long as the run has an older one.

    Raises:
        CheckpointError: on all ranks: the checkpoint is damaged; the text offers the previous one.
        ConfigError: the ranks do not see the same run folder.
    """
    while True:
        source = _newest_permanent(job.run.dir) if name is None else _named(job.run.dir, name)
        if name is None:
            after = -1 if source is None else int(source.name[5:])
            for callback in callbacks:
                if (newer := callback.find_checkpoint(job, after)) is not None:
                    return newer
        if source is None:
            if distributed.rank() == 0:
                logger.warning("%s has no complete checkpoint yet: starting at step 0", job.run.dir)
            return None
        try:
            verify_together(source)
            return source
        except CheckpointError as error:
            if not skip_damaged or name is not None or error.passing or not _pass_over(source, error):
                raise


def give_up(run_dir: Path, source: Path, callbacks: Sequence[Callback] = ()) -> str:
    """Let a run whose loss was not a number right after ``source`` continue from an earlier checkpoint. Collective.

    A permanent one is set aside as ``diverged-step-...``; the callback that has found another forgets it.

    Returns:
        What was done; empty where nothing can be: there is no earlier checkpoint, or a later one was set aside before,
        and so the checkpoint is not the cause.
    """
    done = ""
    with distributed.synchronize_errors():
        if distributed.rank() == 0:
            older = [path for path in checkpoints_of(run_dir) if path.name < source.name]
            before = [path for path in source.parent.glob("diverged-step-*") if path.name[9:] > source.name]
            if older and source.parents[1] != run_dir:
                if any(callback.give_up(run_dir, source) for callback in callbacks):
                    done = f"{source.name} of the hosts' memory is given up"
            elif older and not before:
                point("latest", older[-1])
                done = f"{source.name} is set aside as {set_aside(source, 'diverged').name}"
            if done:
                done += f", the run continues from {older[-1].name}"
    return distributed.broadcast_object(done)


def _newest_permanent(run_dir: Path) -> Path | None:
    return _seen_alike(run_dir, lambda: [None, *checkpoints_of(run_dir)][-1])


def _named(run_dir: Path, name: str) -> Path | None:
    return _seen_alike(run_dir, lambda: find_checkpoint(run_dir / "checkpoints" / name))


def _seen_alike(run_dir: Path, look: Callable[[], Path | None]) -> Path | None:
    """What ``look`` finds, once all ranks find the same: a host may see late what another has just done. Collective."""
    until, told = time.monotonic() + _PATIENCE, False
    while True:
        with distributed.synchronize_errors():
            found = look()
        views = distributed.gather_objects((found, time.monotonic() > until))
        others = [view for view, _ in views if view != views[0][0]]
        if not others:
            return found
        differ = f"run.dir {run_dir}: ranks see different checkpoints ({views[0][0]} and {others[0]})"
        with distributed.synchronize_errors():
            if any(late for _, late in views):
                raise ConfigError(differ)
        if distributed.rank() == 0 and not told:
            logger.warning("%s; waiting up to %.0f s for the file system", differ, _PATIENCE)
        told = True
        time.sleep(_PAUSE)


def _pass_over(source: Path, error: CheckpointError) -> bool:
    """Set a damaged checkpoint aside, where the run has an older one. Collective."""
    done = False
    with distributed.synchronize_errors():
        if distributed.rank() == 0 and (older := [p for p in checkpoints_of(source.parents[1]) if p != source]):
            point("latest", older[-1])
            kept = set_aside(source, "damaged")
            logger.error("%s. The run starts again by itself, from %s; %s is kept", error, older[-1].name, kept)
            done = True
    return distributed.broadcast_object(done)
