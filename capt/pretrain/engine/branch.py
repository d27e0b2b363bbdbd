"""A run that begins at a checkpoint of another run, such as a decay of the learning rate. Imports no torch.

The checkpoint is put into the new run's folder before anything else is done (as links to its files where the file
system has them), and the run then continues from it as any resumed run. So the other run may continue, and remove it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from capt.pretrain.base.atomic import sync
from capt.pretrain.base.errors import ConfigError, quoted
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.step_folders import MANIFEST, checkpoints_of, is_step, step_of


def branch_point(source: Path) -> Path:
    """Return the checkpoint folder that ``run.branch_from`` means: of a run its newest one.

    Raises:
        ConfigError: there is none.
    """
    found = source.resolve()
    if not (found / MANIFEST).is_file():
        complete = checkpoints_of(found)
        if not complete:
            raise ConfigError(f"run.branch_from {source}: neither a run with a complete checkpoint nor a checkpoint")
        found = complete[-1]
    if not is_step(found.name):
        raise ConfigError(
            f"run.branch_from {source}: a checkpoint's folder is called step-NUMBER, this one {found.name}"
        )
    return found


def chosen_branch(given: Path, run_dir: Path, before: Path | None) -> Path:
    """Return the checkpoint that the run in ``run_dir`` branches from: ``before``, once that has been decided.

    Raises:
        ConfigError: ``given`` is not a checkpoint, one of this very run, or of another run than ``before``.
    """
    # A checkpoint in the record: it was chosen before. A run in it: that job was killed before it chose.
    if before is not None and is_step(before.name):
        run = before.parents[1]
        if given != before and run not in (given.resolve(), *given.resolve().parents):
            raise ConfigError(
                f"run.branch_from {given}: run.dir {run_dir} has branched from {before}; name another folder"
            )
        return before
    found = branch_point(given)
    planted = checkpoints_of(run_dir)
    if before is not None and planted:  # killed before the record named it; the other run may have gone on meanwhile
        found = found.with_name(planted[0].name)
    if run_dir.resolve() in found.parents:
        raise ConfigError(
            f"run.branch_from {given} is a checkpoint of run.dir itself; name another run.dir, or go back in this one: "
            f"capt resume {quoted(run_dir)} --checkpoint {quoted(found.name)}"
        )
    return found


def plant(checkpoint: Path, run_dir: Path) -> Path | None:
    """Put ``checkpoint`` into the folder of a run that has none yet; return where, or None where the run has its own.

    Raises:
        ConfigError: it is gone, or was removed meanwhile.
    """
    folder = run_dir / "checkpoints"
    if checkpoints_of(run_dir):
        return None
    # Filled under a name that nothing takes for a checkpoint, then renamed.
    target, partial = folder / checkpoint.name, folder / f".{checkpoint.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        for path in sorted(checkpoint.rglob("*")):
            inner = partial / path.relative_to(checkpoint)
            inner.mkdir() if path.is_dir() else _link_or_copy(path, inner)
        # A folder that its run has removed meanwhile lists nothing and raises nothing: this does.
        (partial / MANIFEST).stat()
    except FileNotFoundError:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(
            f"run.branch_from: {checkpoint} is gone; name a checkpoint that its run keeps (checkpoint.keep_every there)"
        ) from None
    partial.rename(target)
    # The folder of checkpoints may be new, so that its own name must last as well.
    for each in (folder, run_dir):
        sync(each)
    return target


def _link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, for nothing changes it in place; copy it where it cannot be linked."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    # Another file system, or one without hard links.
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)
        sync(target)


def branched(job: Job, checkpoint: Path) -> Job:
    """Return the job of a run that has branched from ``checkpoint``: with a decay, it decays from there to its end.

    Raises:
        ConfigError: the checkpoint is within the warmup of the job, or after its end.
    """
    schedule, step = job.schedule, step_of(checkpoint)
    if schedule.type == "wsd" and schedule.decay_steps:
        schedule = schedule.model_copy(update={"max_steps": step + schedule.decay_steps})
    if step < schedule.warmup_steps:
        raise ConfigError(
            f"run.branch_from {checkpoint}: step {step} is within the schedule.warmup_steps {schedule.warmup_steps} "
            "of this job; branch from a later checkpoint"
        )
    if step >= schedule.max_steps:
        raise ConfigError(
            f"run.branch_from {checkpoint}: step {step} is not before schedule.max_steps {schedule.max_steps}; raise "
            "it, or set schedule.type=wsd and schedule.decay_steps"
        )
    run = job.run.model_copy(update={"branch_from": checkpoint})
    return job.model_copy(update={"run": run, "schedule": schedule})
