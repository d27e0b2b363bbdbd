"""Restarts a job that lost a process or hung, from its newest checkpoint, as often as ``supervise.restarts`` allows."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from capt.launcher.plan import UNATTENDED, End, Launch
from capt.launcher.requeue import again
from capt.launcher.supervisor.activity import write_crash
from capt.launcher.supervisor.output import patient_log
from capt.launcher.supervisor.processes import stop_asked, stop_signals
from capt.pretrain.base.errors import ConfigError, UserError, is_passing, machines_at_fault, user_text
from capt.pretrain.base.files import read_bytes
from capt.pretrain.engine.run_folder import CONFIG, FAILED, STATUS, STOPPED
from capt.pretrain.engine.step_folders import MANIFEST, checkpoints_of

log = logging.getLogger(__name__)

_READ_ONLY, _POLL = 30.0, 0.5


def supervise(launch: Launch, attempt: Callable[[Launch], End], name: str = "") -> End:
    """Carry out a launch, and again as a resumed one while ``supervise.restarts`` allows it.

    A job is started again when a process of it died, hung, or ended with an error of the program. It is not when its
    input is bad, when it was asked to stop (however it ended then), when it says itself that it cannot continue (a loss
    that is not a number), when it had not begun, or when it made no step since it was started the last time,
    unless a host was lost. Restarts are counted under ``name``; without one, those of this call are.
    """
    ahead = _ahead(launch)
    own = name or f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    # of an attempt's own signals, only what comes between two gets here
    with patient_log(), stop_signals(lambda _: None, lambda: None):
        while True:
            begun = time.monotonic()
            end = _guarded(attempt, launch)
            goes_on = end.code == FAILED and _may_go_on(launch, own, end, time.monotonic() - begun)
            if end.crash is not None and _has_begun(launch):
                report = write_crash(launch.run_dir, end.crash)
                log.error("%s%s", end.crash.cause, f" ({report})" if report else "")  # of all lines the last
            if not goes_on:
                return end
            launch = resumed(launch, end, chosen=bool(ahead & _manifests(launch.run_dir)))
            if stop_asked():  # it came meanwhile
                return End(STOPPED, "asked to stop before the job was started again")


def _guarded(attempt: Callable[[Launch], End], launch: Launch) -> End:
    """Attempt a launch; what one that is started again finds missing, its run has had before."""
    with machines_at_fault(lambda: launch.again):
        return attempt(launch)


def resumed(launch: Launch, end: End, *, chosen: bool = False) -> Launch:
    """The launch that continues the run of another one, which ended so, from its newest checkpoint.

    Keys that ``capt resume`` was given still count. So does, with ``chosen``, the checkpoint that it was to go back to.
    The lock of a host that was lost is waited for.
    """
    words = [str(launch.run_dir / CONFIG), "--resume", *["--debug"] * ("--debug" in launch.arguments)]
    if "--resume" in launch.arguments:
        words = list(launch.arguments)
    # UNATTENDED adds the first two again; to go back to a checkpoint was asked for once.
    for option, values in (("--wait", 1), ("--skip-damaged", 0), *[("--checkpoint", 1)] * (not chosen)):
        if option in words:
            at = words.index(option)
            del words[at : at + 1 + values]
    left = {**launch.left, **end.left}
    return replace(launch, arguments=(*words, *UNATTENDED), files={}, unmerged=None, again=True, left=left)


def has_gone_back(run: Path, checkpoint: str, since: int) -> bool:
    """Return whether a job begun at ``since`` (ns) has gone back to a checkpoint: no later one is older than that."""
    return not any(name > checkpoint and written < since for name, _, written in _manifests(run))


def _ahead(launch: Launch) -> set[tuple[str, int, int]]:
    """The manifests of checkpoints later than the one that ``capt resume --checkpoint`` named.

    A rank sets those aside just before the first step. While one is still there, the job has not yet gone back.
    """
    if "--checkpoint" not in launch.arguments:
        return set()
    name = launch.arguments[launch.arguments.index("--checkpoint") + 1]
    return {each for each in _manifests(launch.run_dir) if each[0] > name}


def _manifests(run: Path) -> set[tuple[str, int, int]]:
    """Name, inode and time of each checkpoint's manifest: a later checkpoint of the same step has others."""
    found = [(path.name, (path / MANIFEST).stat()) for path in checkpoints_of(run)]
    return {(name, facts.st_ino, facts.st_mtime_ns) for name, facts in found}


def outlast(launch: Launch) -> bool:
    """Wait while the file system of the run folder fails, as a lost host is waited for; return whether it did fail.

    One that is read-only is given half a minute: few come back by themselves.
    """
    begun, logged = time.monotonic(), False
    while (error := _outage(launch.run_dir)) is not None and not stop_asked():
        patience = _READ_ONLY if error.errno == errno.EROFS else 60 * launch.job.supervise.wait_minutes
        if not logged:
            log.warning("%s; waiting up to %g minutes for the file system", user_text(error), patience / 60)
        logged = True
        if time.monotonic() - begun > patience:
            break
        time.sleep(_POLL)
    return logged


def _outage(run: Path) -> OSError | None:
    """Return the error of the file system of a run folder; None where it works, or the folder itself is at fault."""
    try:
        read_bytes(run / STATUS, error=ConfigError)
        os.utime(run)  # a write that changes nothing
    except OSError as error:
        return error if error.errno == errno.EROFS or is_passing(error) else None
    except ConfigError:  # something else is there
        return None
    return None


def _has_begun(launch: Launch) -> bool:
    try:
        return (launch.run_dir / CONFIG).is_file()
    except OSError:  # it cannot be told
        return False


def _may_go_on(launch: Launch, own: str, end: End, seconds: float) -> bool:
    """Decide whether a failed job, which ran for this number of seconds, may be started again; count it if so."""
    run, limit, every = launch.run_dir, launch.job.supervise.restarts, launch.job.checkpoint.fixed_distance
    if not limit or not _has_begun(launch):
        return False
    try:
        return not stop_asked() and again(
            run,
            FAILED,
            limit,
            own,
            every=every,
            seconds=seconds,
            lost_host=end.lost_host,
            slow_files=end.slow_files,
        )
    except (UserError, OSError) as error:  # it cannot be counted: a full disk, say
        log.error("not started again: %s", user_text(error) or error)
        return False
