"""Writes the average of the weights of a finished run (``checkpoint.average``, ``checkpoint.ema``)."""

from __future__ import annotations

import logging

from capt.pretrain.base import distributed
from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import CheckpointError, ConfigError, counted, quoted
from capt.pretrain.engine.checkpoint.merge import merge_checkpoints
from capt.pretrain.engine.durable import write_error
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.step_folders import MANIFEST, step_folder, step_of

logger = logging.getLogger(__name__)

FOLDER = "average"


class Averager(Callback):
    """Makes ``RUN/average`` of the last checkpoints, or of the averages in the last one, when all steps are done.

    It is made of files alone, and of the same ones whether the run was interrupted or not.
    """

    follows = ("Checkpointer",)

    def on_start(self, run: Run) -> None:
        section, steps = run.job.checkpoint, run.job.schedule.max_steps
        found = len(section.averaged_steps(steps))
        # Enough of them, or no average wanted: 0 is below every number.
        if found >= section.average:
            return
        have = f"checkpoint.every {section.every} and schedule.max_steps {steps} make {counted(found, 'checkpoint')}"
        if found == 1:
            raise ConfigError(f"checkpoint.average {section.average}: {have}, its own average; lower checkpoint.every")
        if distributed.rank() == 0:
            logger.warning("checkpoint.average %d: %s, and the average is of these", section.average, have)

    def next_due(self, run: Run) -> int:
        return NEVER

    def on_end(self, run: Run) -> None:
        if run.finished:
            write_average(run)


def write_average(run: Run, *, again: bool = True) -> None:
    """Write the average of a finished run, where its job wants one; not ``again`` where it is there. Collective."""
    section = run.job.checkpoint
    if not section.average and section.ema is None:
        return
    with distributed.synchronize_errors(patient=True):
        if distributed.rank() == 0 and (again or not (run.dir / FOLDER).exists()):
            _write(run)


def _write(run: Run) -> None:
    section, steps = run.job.checkpoint, run.job.schedule.max_steps
    chosen = [step_folder(run.dir, step) for step in section.averaged_steps(steps) or [steps]]
    branch = run.job.run.branch_from
    begun = -1 if branch is None else step_of(branch)  # the checkpoint of the other run is not of this one
    chosen = [path for path in chosen if step_of(path) > begun]
    there = [path for path in chosen if (path / MANIFEST).is_file()]
    if lost := [path.name for path in chosen if path not in there]:
        logger.warning("checkpoint.average: %s could not be written; the average is without", ", ".join(lost))
    if not there:
        raise CheckpointError(f"checkpoint.average: none of its checkpoints is in {run.dir}; there is no average")
    out = run.dir / FOLDER
    try:
        with new_folder(out, replace=True) as folder:
            shares = [1 / len(there)] * len(there)
            merge_checkpoints(there, shares, folder, out, average=section.ema is not None)
    except OSError as error:
        raise write_error(out, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the run itself is complete, its last checkpoint is {there[-1].name}") from None
    made = f"{len(there)} checkpoints" if section.ema is None else "its last steps"
    logger.info("average of %s: %s (capt evaluate %s)", made, out, quoted(out))
