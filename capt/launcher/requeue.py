"""``python -m capt.launcher.requeue RUN CODE [RESTARTS]``: run by a batch script at its end, to ask for another run.

The status of a job that was killed is corrected. Exit code 0 means that the job is to be queued again, which never
happens without RESTARTS, nor to one that was cancelled. A job that stopped
early (75) is queued again, unless it has made no step ten times in a row: its time limit is shorter than what it does
before the first step. One that failed is as long as it has made a step since the last time that it was for this reason,
and at most RESTARTS times, of which progress gives some back: what fails immediately would fail every time. One that
says itself that it cannot continue (a loss that is not a number) is not.
"""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import Field, FiniteFloat

from capt.launcher.allocation import Allocation
from capt.launcher.watch import StatusWatch
from capt.pretrain.base.errors import UserError, quoted, user_text
from capt.pretrain.base.files import write_json
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.config import load_job
from capt.pretrain.engine.run_folder import BAD_INPUT, CONFIG, DONE, FAILED, STOPPED, last_step, read_status
from capt.pretrain.reliability.rollbacks import read_rollbacks

log = logging.getLogger(__name__)

RECORD = "restarts.json"
_IDLE_STOPS = 10
_CHECKPOINTS, _HOUR = 10, 3600.0
_PATIENCE = 60.0
"""Seconds for Slurm's controller, which may be busy."""


class Restarts(Record):
    """Number of times that a job was queued again after a failure, and the step reached then; the same for stops."""

    job: str = Field(max_length=100)
    failures: Count = 0
    step: Count | None = None
    counted: Count = 0
    """The step up to which progress has been counted."""
    progress: FiniteFloat = Field(0.0, ge=0.0, strict=False)
    """Progress since the last restart was given back: 1 gives back the next."""
    idle_stops: Count = 0
    stopped_at: Count | None = None
    rollbacks: Count = 0
    """Number of times that it had gone back from a spike of the loss by then, which is no failure."""


def record_end(run: Path, code: int) -> None:
    """Write how the job ended where it could not do so itself."""
    known = code if code in (BAD_INPUT, STOPPED) else FAILED
    StatusWatch.begin(run).record_end(known, f"the ranks ended with {_exit_text(code)} and did not say why")


def again(
    run: Path,
    code: int,
    limit: int,
    job: str,
    *,
    every: int = 0,
    seconds: float = 0.0,
    lost_host: bool = False,
    slow_files: bool = False,
) -> bool:
    """Decide whether the job ``job`` in the folder ``run``, which ended with ``code``, is to be queued again.

    A restart is given back for progress: the steps of ten checkpoints (``every`` steps each), or an hour of the
    ``seconds`` that the job ran. A ``lost_host`` is counted, but is not a sign that the job would fail at the same step
    again: the next may be lost while the job starts again without the first. A job that ended for ``slow_files`` is not
    counted, as long as it made a step since the last time.

    Raises:
        UserError: ``restarts.json`` or ``status.json`` is damaged.
    """
    if code in (DONE, BAD_INPUT):
        return False
    status = read_status(run)
    if code != STOPPED and status is not None and status.final:
        log.error("not started again: it would end the same")
        return False
    before, step = _restarts(run, job), last_step(run)
    lost_host |= status is not None and status.passing  # nor does it say anything of the program
    # Stopped early, at its time limit say: again, as long as it makes steps between.
    if code == STOPPED:
        idle = before.idle_stops + 1 if step == before.stopped_at else 0
        if idle >= _IDLE_STOPS:
            log.error("not queued again: stopped %d times at step %d; raise the time limit of the job", idle + 1, step)
            return False
        write_json(run / RECORD, before.model_copy(update={"idle_stops": idle, "stopped_at": step}).model_dump())
        return True
    # Failures that are not counted: each has a bound of its own.
    rollbacks = len(read_rollbacks(run))  # of which guard.spikes bounds the number
    if rollbacks > before.rollbacks and status is not None and status.reason.startswith("RolledBackError:"):
        write_json(run / RECORD, before.model_copy(update={"rollbacks": rollbacks}).model_dump())
        log.warning("started again without the samples of a spike of the loss, which ended at step %d", step)
        return True
    if status is not None and status.reason.startswith("GivenUpError:"):  # once for each checkpoint at most
        return True
    if slow_files and step != before.step:
        write_json(run / RECORD, before.model_copy(update={"step": step}).model_dump())
        log.warning("ended at step %d for a file system that did not answer; started again, which is not counted", step)
        return True
    # All others are counted; progress gives counts back.
    before = _with_progress(before, step, every, seconds)
    if before.failures >= limit:
        log.error("failed, and not started again: that was done %d times (restarts)", limit)
        return False
    if step == before.step and not lost_host:  # a lower one is progress: the job had gone back to its last checkpoint
        log.error("failed, and not started again: no step was made since the last time (step %d)", step)
        return False
    failed = before.model_copy(update={"failures": before.failures + 1, "step": before.step if lost_host else step})
    write_json(run / RECORD, failed.model_dump())
    log.warning("failed at step %d; started again (%d of %d times)", step, before.failures + 1, limit)
    return True


def _with_progress(before: Restarts, step: int, every: int, seconds: float) -> Restarts:
    """The record with the restarts given back that the job has earned since its last failure."""
    made = step - before.counted
    if made <= 0:
        return before
    now = max(made / (_CHECKPOINTS * every) if every else 0.0, seconds / _HOUR)
    earned = round(before.progress + now, 6)
    failures = max(0, before.failures - int(earned))
    progress = earned % 1 if failures else 0.0  # nothing is saved up for failures to come
    return before.model_copy(update={"failures": failures, "progress": progress, "counted": step})


def _every(run: Path) -> int:
    """Return the steps between two checkpoints of a run; 0 with ``auto``, or where its configuration is unreadable."""
    with suppress(UserError, OSError):
        return load_job(run / CONFIG, resolved=True).checkpoint.fixed_distance
    return 0


def _restarts(run: Path, job: str) -> Restarts:
    with suppress(FileNotFoundError):
        restarts = read_record(Restarts, run / RECORD, "; remove the file")
        if restarts.job == job:
            return restarts
    return Restarts(job=job)


def cancelled(job: str) -> bool:
    """Return whether ``scancel`` ends the batch job that this process belongs to.

    Slurm ends such a job while its script still runs, and would queue it again if it was asked to. It also ends one at
    its time limit, or for another job that is more important; it then gives the reason or the time.
    """
    try:
        shown = subprocess.run(
            ["scontrol", "show", "job", job, "--oneliner"],
            capture_output=True, text=True, check=False, timeout=_PATIENCE,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    facts = dict(re.findall(r"(?:^| )(JobState|Reason|PreemptTime)=(\S+)", shown))
    others = facts.get("Reason") == "TimeLimit" or facts.get("PreemptTime", "None") != "None"
    return facts.get("JobState") in ("COMPLETING", "CANCELLED") and not others


def _exit_text(code: int) -> str:
    names = {128 + number: f"{code} (killed by {number.name})" for number in signal.Signals}
    return names.get(code, str(code))


def main(arguments: Sequence[str]) -> int:
    """Run the command line of the batch script."""
    logging.basicConfig(level=logging.INFO, format="[capt] %(message)s", stream=sys.stderr)
    run, code = Path(arguments[0]), int(arguments[1])
    record_end(run, code)
    allocation = Allocation.here()
    try:
        job = allocation.own_id
        if not arguments[2:] or code in (DONE, BAD_INPUT):
            return 1
        if cancelled(job):
            log.info("cancelled, and not queued again; continue with: capt resume %s", quoted(run))
            return 1
        return 0 if again(run, code, int(arguments[2]), job, every=_every(run)) else 1
    except Exception as error:
        text = user_text(error)
        if text is None:
            raise
        if isinstance(error, OSError):
            done = allocation.restarts  # Slurm counts where we cannot
            log.warning("%s; queued again by Slurm's count (%d of %s)", text, done, arguments[2])
            return 0 if done < int(arguments[2]) else 1
        log.error("not queued again: %s", text)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
