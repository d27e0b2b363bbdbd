"""Run folder as launchers and ranks share it: exit codes, status, best checkpoint, lock. Imports no torch."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, FiniteFloat

from capt.pretrain.base.errors import ConfigError, LockedError, UserError, is_passing, quoted, shown
from capt.pretrain.base.files import open_lock, require_own_folder, write_json
from capt.pretrain.base.locks import is_locked
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.base.verification import ALONE, Ranks
from capt.pretrain.config.load import flat_keys, flatten, load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.metrics_file import METRICS, last_step_in
from capt.pretrain.engine.step_folders import checkpoints_of

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with an error which ``user_text`` has a line for.

    2 is for what the user can mend by typing. What may be gone when the job is tried again is 1, and 75 where another
    process holds the folder, which is no failure of this job.
    """
    if not is_passing(error):
        return BAD_INPUT
    return STOPPED if isinstance(error, LockedError) else FAILED


LOGGED = "capt_logged"
"""The attribute of an error that names the log of this rank, where its stack trace is."""

STATUS, BEST, LOCK = "status.json", "best.json", ".training"
CONFIG = "config.yaml"
CRASHES = "crashes"
_RUN_PARTS = (METRICS, "checkpoints")
OWN_FOLDERS = ("average", "checkpoints", "codes", CRASHES, "ledger", "log", "profile", "tensorboard")
"""Folders of a run in which a job writes and removes: no links, so that nothing outside the run is touched."""
_LONGEST_REASON = 2000
PATIENCE = 180.0
"""Seconds for which a job that starts by itself waits for the lock of the folder: a file server keeps the locks of a
lost host until its lease ends (NFS 4: 90 seconds)."""
_NOT_THE_JOB = frozenset(("run.dir", "run.resume", "run.branch_from"))
"""Keys that say where a job is and how it begins, and not what it is."""
_SHOWN_KEYS = 5


class Status(Record):
    """``status.json``: the state of the run.

    ``starting`` (data are prepared, nothing is trained yet), ``running``, ``done``, ``stopped`` (resumable) or
    ``failed``. A process that is killed cannot write, so ``starting`` and ``running`` are only true while a process
    holds the folder's lock (:func:`is_active`).
    """

    state: Literal["starting", "running", "done", "stopped", "failed"]
    step: Count = 0
    exit_code: int | None = Field(None, ge=0, le=255)
    reason: str = Field("", max_length=1_000_000)
    passing: bool = False
    """True if a job that failed has found a machine at fault, so that it may go well when it is started again."""
    failed_saves: Count = 0
    """Periodic checkpoints that could not be written (a full disk); the run continued without them."""
    final: bool = False
    """True if a job that failed has found itself that it cannot continue: started again it would end the same."""


class Best(Record):
    """``best.json``: the best validation value of ``checkpoint.best``, and the step it belongs to."""

    metric: str = Field(max_length=1000)
    mode: Literal["max", "min"]
    step: Count
    value: FiniteFloat = Field(strict=False)


_R = TypeVar("_R", bound=Record)


def read_status(folder: Path) -> Status | None:
    """The status of the run in ``folder``; None without a ``status.json``. Raises ``ConfigError`` if it is damaged."""
    return _read(folder / STATUS, Status)


def read_best(folder: Path) -> Best | None:
    """The record of the best checkpoint; None without a ``best.json``. Raises ``ConfigError`` if it is damaged."""
    return _read(folder / BEST, Best)


def write_status(folder: Path, status: Status) -> None:
    """Replace ``status.json``; on a full disk in place, since a run that ends there must say so."""
    status = status.model_copy(update={"reason": status.reason[:_LONGEST_REASON]})
    values = status.model_dump(
        exclude={name for name in ("failed_saves", "final", "passing") if not getattr(status, name)}
    )
    try:
        write_json(folder / STATUS, values)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (folder / STATUS).is_file():
            raise
        with open_lock(folder / STATUS, error=ConfigError) as file:  # its block is there already
            file.truncate()
            file.write(status.model_dump_json())


def write_best(folder: Path, best: Best) -> None:
    """Replace ``best.json``."""
    write_json(folder / BEST, best.model_dump())


def _read(path: Path, kind: type[_R]) -> _R | None:
    with suppress(FileNotFoundError):
        return read_record(kind, path, "; remove the file")
    return None


def check_is_free(folder: Path) -> None:
    """Refuse a folder that already holds a run, or parts of one. Raises ``ConfigError``."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir {folder} is a file; name a folder")
    if holds_run(folder):
        raise ConfigError(
            f"run.dir {folder} already holds a run; continue it with capt resume {quoted(folder)}, "
            "start or resume it with --resume auto, or name another folder"
        )
    if part := next((name for name in _RUN_PARTS if os.path.lexists(folder / name)), None):
        raise ConfigError(
            f"run.dir {folder} holds {part} of a run without its {CONFIG}, so that it cannot be continued; name "
            f"another folder, or move it away: mv {quoted(folder)} {quoted(f'{folder}.old')}"
        )


def resumes_by_itself(folder: Path, job: Job) -> bool:
    """Return whether ``run.resume=auto`` continues the run in ``folder``; False where the job begins a new one.

    A folder without its ``config.yaml`` may be what a fetch has left that was cut short. Where the job has a store
    (``checkpoint.upload``) this is for the rank to find out that fetches.

    Raises:
        ConfigError: the folder holds a run, and the job is another one or has ``run.resume=never``.
    """
    if job.run.resume != "auto" or not holds_run(folder):
        if job.run.resume != "auto" or job.checkpoint.upload is None:
            check_is_free(folder)
        return False
    check_is_no_checkpoint(folder)
    refuse_another_job(folder, _given_keys_of_another_job(folder, job))
    return True


def _given_keys_of_another_job(folder: Path, job: Job) -> dict[str, tuple[object, object]]:
    """Return `keys_of_another_job` that the job itself sets.

    The run's file holds values for keys that the job leaves open: the data have decided them, or an earlier command.
    """
    given = flatten(job.model_dump(mode="json", by_alias=True, exclude_unset=True))
    if getattr(job.schedule, "epochs", None) is not None:
        # Both follow from the epochs and the data.
        given.pop("schedule.max_steps", None)
        if getattr(job.schedule, "warmup_ratio", None) is not None:
            given.pop("schedule.warmup_steps", None)
    return {key: values for key, values in keys_of_another_job(folder, job).items() if key in given}


def is_finished(folder: Path, job: Job) -> bool:
    """Return whether ``folder`` holds a finished run of this very job; a damaged status says nothing."""
    status = None
    with suppress(ConfigError):
        status = read_status(folder)
    return status is not None and status.state == "done" and not keys_of_another_job(folder, job)


def has_begun(folder: Path, job: Job) -> bool:
    """Return whether ``folder`` holds a run of this very job: what it read, wrote and used was there then."""
    try:
        return holds_run(folder) and not _given_keys_of_another_job(folder, job)
    except (UserError, OSError):
        return False


def keys_of_another_job(folder: Path, job: Job) -> dict[str, tuple[object, object]]:
    """The dotted keys in which ``job`` differs from that of the run in ``folder``, each with its old and new value."""
    changed = changed_keys(load_job(folder / CONFIG, resolved=True), job)
    if job.run.branch_from is not None and job.schedule.decay_steps:
        changed.pop("schedule.max_steps", None)  # follows from the checkpoint that the run has branched from
    return {key: values for key, values in changed.items() if key not in _NOT_THE_JOB}


def refuse_another_job(folder: Path, changed: Mapping[str, tuple[object, object]]) -> None:
    """Refuse to resume by itself a run of a job with other keys. Raises ``ConfigError`` that names them."""
    if changed:
        # Another task has other sections, whose keys would say no more.
        names = ["task.type"] if "task.type" in changed else list(changed)
        listed = ", ".join(line for name in names[:_SHOWN_KEYS] for line in describe_change(name, *changed[name]))
        more = f" and {len(names) - _SHOWN_KEYS} more keys" if len(names) > _SHOWN_KEYS else ""
        raise ConfigError(
            f"run.resume=auto: run.dir {folder} holds a run of another job: {listed}{more}; name another folder, or "
            f"continue the run with capt resume {quoted(folder)}, which takes keys to change"
        )


def changed_keys(old: Job, new: Job) -> dict[str, tuple[object, object]]:
    """The dotted keys whose values differ between two jobs, each with its old and new value."""
    a, b = (flat_keys(job) for job in (old, new))
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def describe_change(key: str, old: object, new: object) -> list[str]:
    """Describe the changes of a key, a text each; for lists of named sections, by section and key."""
    sides = [_by_name(value) for value in (old, new)]
    if not all(sides):
        return [f"{key} {shown(old)} -> {shown(new)}"]
    a, b = (flatten(side) for side in sides if side)
    return [
        f"{key}.{part} {shown(a.get(part))} -> {shown(b.get(part))}"
        for part in sorted(a.keys() | b.keys())
        if a.get(part) != b.get(part)
    ] or [f"{key}: the order of {', '.join(sides[1] or ())}"]


def _by_name(value: object) -> dict[str, Mapping[str, Any]] | None:
    """The sections of a list by their names; None where a value is something else."""
    if not isinstance(value, list) or not all(isinstance(each, Mapping) and "name" in each for each in value):
        return None
    return {str(each["name"]): each for each in value}


def check_folders(job: Job) -> None:
    """Refuse a folder of the job that is a file, or is in one. Raises ``ConfigError``."""
    cache = getattr(getattr(job, "data", None), "cache", None)
    folders = {"run.dir": job.run.dir, "data.cache": cache, "checkpoint.local.dir": job.checkpoint.local.dir}
    for key, folder in folders.items():
        if folder is not None and (file := next((path for path in (folder, *folder.parents) if path.is_file()), None)):
            raise ConfigError(f"{key} {folder}: {file} is a file; name a folder")


def check_is_own(folder: Path) -> None:
    """Refuse a run folder of which a part is a link: what is there would be appended to, pruned or removed.

    The run folder itself may be a link. Raises ``ConfigError``.
    """
    for name in OWN_FOLDERS:
        require_own_folder(folder / name, error=ConfigError)


def require_run(folder: Path) -> None:
    """Refuse a folder in which no run has begun, and a checkpoint. Raises ``ConfigError``."""
    if not (folder / CONFIG).is_file():
        fetched = any(os.path.lexists(folder / name) for name in _RUN_PARTS)
        more = f", or give the command of the job with --resume auto again, where {folder} was being fetched"
        raise ConfigError(
            f"{folder} is not a run folder: it has no {CONFIG}; name a folder that a job wrote (run.dir)"
            f"{more if fetched else ''}"
        )
    check_is_no_checkpoint(folder)


def check_is_no_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint as a run folder: it has a ``config.yaml`` too, but what is written into it damages it.

    Raises ``ConfigError``.
    """
    if not (folder / "manifest.json").is_file():
        return
    run, name = folder.parent.parent, folder.resolve().name
    of_a_run = folder.parent.name == "checkpoints" and (run / CONFIG).is_file()
    again, weights = f"capt resume {quoted(run)} --checkpoint {quoted(name)}", quoted(f"model.init={folder}")
    remedy = again if of_a_run else f"{weights} begins a run with its weights"
    raise ConfigError(f"{folder} is a checkpoint, not a run folder; {remedy}")


def holds_run(folder: Path) -> bool:
    """Return whether a job has begun a run in ``folder``, which can then be resumed or reported.

    Its ``config.yaml`` makes it one: it is the first file that a job writes, and the last one that is fetched.
    """
    return os.path.lexists(folder / CONFIG)


def discard_refused(folder: Path) -> None:
    """Remove the status, launch options and empty log folder of a job that was refused before its first step.

    A folder that holds a run stays as it is.
    """
    if holds_run(folder):
        return
    for name in (STATUS, "launch.json", LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        (folder / "log").rmdir()


def is_active(folder: Path) -> bool:
    """Return whether a process trains in ``folder`` at this moment."""
    return is_locked(folder / LOCK)


def last_step(folder: Path) -> int:
    """The newest step in the status or the metrics of a run; a process that was killed wrote no status."""
    steps = [0]
    with suppress(UserError, OSError):
        steps += [status.step] if (status := read_status(folder)) else []
    with suppress(UserError, OSError):
        steps.append(last_step_in(folder / METRICS))
    return max(steps)


# What a run has made at its first start and continues with, whatever becomes of the data and of the cache.


def kept_in_run(run_dir: Path, name: str, applies: Callable[[Job], bool], ranks: Ranks = ALONE) -> Path | None:
    """The file or folder ``name`` of the newest checkpoint, copied into the run, since checkpoints are pruned.

    None where the run has no checkpoint, its checkpoint holds no ``name``, or its job says that this is no longer what
    is wanted. All ``ranks`` call this.

    Args:
        run_dir: the run.
        name: as the task's ``export_files`` has it.
        applies: whether what the job of the checkpoint has made is what the job of now would make.
        ranks: those that run the job.
    """
    from capt.pretrain.engine.checkpoint import read_job  # DeepSpeed, which preparing alone does without

    with ranks.synchronize_errors():
        newest = [None, *checkpoints_of(run_dir)][-1]
        if newest is None or not applies(read_job(newest)) or not (newest / name).exists():
            return None
        kept = run_dir / name
        if ranks.rank == 0:  # anew at each start: the copy may have lost bits, or a power cut its content
            partial = run_dir / f".{name}"
            if (newest / name).is_dir():
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(newest / name, partial, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(newest / name, partial)
            if kept.is_dir() and not kept.is_symlink():
                shutil.rmtree(kept)
            partial.replace(kept)
    return kept
