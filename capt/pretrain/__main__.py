"""``python -m capt.pretrain CONFIG [a.b=c ...] [--merged] [--resume [auto]] [--checkpoint NAME] [--wait S]``: one rank.

Every launcher starts this module on every rank; the rank is read from the environment. ``capt`` merges CONFIG once, and
its ranks read the merged job (``--merged``). Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped early but resumable.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything else is imported
    from capt.pretrain.base.process import open_closed_streams, spin_briefly

    open_closed_streams()
    spin_briefly()

import argparse
import importlib.metadata
import importlib.util
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from capt.pretrain.base.errors import MachineError, RunFailedError, UserError, machines_at_fault, user_text
from capt.pretrain.base.process import error_line, use_scratch, with_value_of_resume
from capt.pretrain.base.verification import sha256
from capt.pretrain.config import flat_keys, load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine import heartbeat, interruption
from capt.pretrain.engine.run_folder import CONFIG, FAILED, LOGGED, STOPPED, exit_code_of, has_begun
from capt.pretrain.registry import TASKS

logger = logging.getLogger("capt.pretrain")
_TIMEOUT_MINUTES = 10.0
"""Time for the ranks to meet when the job, which says how long they may wait, cannot be read."""
_FILE_SECONDS = 5.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line of one rank. ``--local_rank``, which DeepSpeed's launcher adds, is accepted and not used."""
    parser = argparse.ArgumentParser(
        prog="python -m capt.pretrain",
        description="Run one rank of a job.",
        epilog="example: python -m capt.pretrain capt_tiny data.files=my.txt schedule.max_steps=200",
    )
    parser.add_argument("config", help="a YAML file or the name of a shipped job")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace the file's")
    parser.add_argument("--merged", action="store_true", help="CONFIG is a merged job: base: and ${...} are not read")
    parser.add_argument(
        "--resume",
        choices=("always", "auto"),
        metavar="[auto]",
        help="continue the run in run.dir; auto: begin it where there is none (run.resume=auto)",
    )
    parser.add_argument("--checkpoint", help="resume from this folder under checkpoints/")
    parser.add_argument("--skip-damaged", action="store_true", help="resume from the newest checkpoint that is whole")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait while another job holds run.dir")
    parser.add_argument("--debug", action="store_true", help="show stack traces of user errors, log at debug level")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(with_value_of_resume(arguments))


_READ_ALIKE = (
    *(f"capt.pretrain.{room}" for room in ("models", "language.prepare", "pairs.prepare")),
    *(f"{package}.task" for package in TASKS.values()),
)
"""Loggers of what every rank reads, and would warn of in the same words: of a thousand ranks one says it."""


def set_up_log(rank: int, *, debug: bool) -> None:
    """Log to stderr: rank 0 everything, the others what they alone can warn of."""
    level = logging.DEBUG if debug else logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=f"[rank {rank}] %(message)s", stream=sys.stderr)
    for name in _READ_ALIKE if rank and not debug else ():
        logging.getLogger(name).setLevel(logging.ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank; returns the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    rank = int(os.environ.get("RANK", "0"))
    set_up_log(rank, debug=options.debug)
    try:
        return _run(options)
    except interruption.Interrupted as stop:
        logger.info("%s", stop)
        return STOPPED
    except Exception as error:
        if interruption.reason():  # another rank ended first, and took the connection with it
            return STOPPED
        summary = user_text(error) or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        heartbeat.fail("".join(traceback.format_exception(error)), summary[:500])
        return _report(error, rank, debug=options.debug)


def _report(error: Exception, rank: int, *, debug: bool) -> int:
    """Say what went wrong, once: rank 0 speaks for what all ranks raise alike."""
    text = user_text(error)
    if isinstance(error, RunFailedError) and not debug:
        if rank == 0 or not error.everywhere:
            _say(str(error))
        return FAILED
    if text is None:
        place = getattr(error, LOGGED, None)
        if place is not None and _is_of_another_rank(error):
            cause = str(error).partition("\n")[0][:200]
            logger.warning("lost the connection to another rank (%s); stack trace in %s", cause, place)
        else:
            logger.error("%s: %s", type(error).__name__, error, exc_info=True)
        return FAILED
    if debug:
        traceback.print_exception(error)
    if rank == 0 or not (isinstance(error, UserError) and error.everywhere):
        _say(text)
    return exit_code_of(error)


def _is_of_another_rank(error: Exception) -> bool:
    """Return whether a rank failed only because its connection to a rank that had failed was lost."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in kinds or any(text in str(error) for text in ("gloo/transport", "Connection closed by peer"))


def _say(text: str) -> None:
    with suppress(OSError):  # a terminal that was closed; the status of the run tells it as well
        sys.stderr.write(f"{error_line(text, sys.stderr)}\n")


def _wait_for(path: Path) -> None:
    """Give a shared file system a few seconds to show the file that the launcher has just written on another host."""
    deadline = time.monotonic() + _FILE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            host = socket.gethostname()
            raise MachineError(f"{path}: {host} does not see it; name a run.dir on a file system that all hosts mount")
        time.sleep(0.1)


def job_of(options: argparse.Namespace) -> Job:
    """The job that a command line means. Raises ``ConfigError``."""
    overrides = [*options.overrides, *["run.resume=auto"] * (options.resume == "auto")]
    of_a_run = options.resume == "always" and Path(options.config).exists()  # else it is the name of a shipped job
    return load_job(options.config, overrides, resolved=options.merged or of_a_run)


def read_job(options: argparse.Namespace) -> Job:
    """`job_of` a command line whose file another host may just have written. Raises ``ConfigError``."""
    if options.merged or (options.resume == "always" and Path(options.config).name == CONFIG):
        _wait_for(Path(options.config))
    return job_of(options)


def _only_resumes(options: argparse.Namespace) -> bool:
    """Return whether a job is to continue as it is: it has begun, even where this host does not see its folder."""
    return options.resume == "always" and not options.overrides


def _run(options: argparse.Namespace) -> int:
    job, refusal = None, None
    try:
        job = read_job(options)
    except (UserError, OSError) as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            with machines_at_fault(lambda: _only_resumes(options)):
                raise
        refusal = error
    from capt.pretrain.base.quiet import quiet_libraries

    quiet_libraries(debug=options.debug)
    from capt.pretrain.base import distributed
    from capt.pretrain.engine.run import run_job

    by_deepspeed = options.local_rank is not None
    begun = has_begun(job.run.dir, job) if job else _only_resumes(options)
    with machines_at_fault(lambda: begun):
        distributed.initialize(job.engine.timeout_minutes if job else _TIMEOUT_MINUTES, by_deepspeed=by_deepspeed)
        # Where a rank sees the run, one that does not see its folder is on a machine that lacks it.
        begun = any(distributed.gather_objects(begun))
        with distributed.synchronize_errors():  # one host may see another file
            if refusal is not None:
                raise refusal
        assert job is not None
        if distributed.world_size() > 1:  # a rank alone need not read all files of the program
            distributed.require_alike(_facts(job, options))
        code = run_job(
            job,
            resume=options.resume == "always",
            checkpoint=options.checkpoint,
            skip_damaged=options.skip_damaged,
            wait=options.wait,
        )
    distributed.shutdown()
    return code


def _facts(job: Job, options: argparse.Namespace) -> dict[str, object]:
    """Return what all ranks must share: the job, its options, versions, and the files of this program and the task."""
    facts = flat_keys(job)
    facts |= {f"--{name}": getattr(options, name) for name in ("resume", "checkpoint", "skip_damaged", "wait")}
    facts |= {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}
    packages, of_task = ["capt.finetune", "capt.pretrain", "capt.tokenizer"], type(job).__module__.rpartition(".")[0]
    for package in packages if of_task.startswith("capt.") else [*packages, of_task]:
        for folder in importlib.util.find_spec(package).submodule_search_locations or ():  # type: ignore[union-attr]
            for path in sorted(Path(folder).rglob("*.py")):
                facts[f"the file {package.replace('.', '/')}/{path.relative_to(folder)}"] = sha256(path)[:16]
    return facts


def run_process() -> int:
    """Run a process that is a rank from start to end; returns the exit code."""
    try:
        interruption.install(exit_code=STOPPED)
        heartbeat.open_page()
        use_scratch()
        code = main()
    except interruption.Interrupted:  # before `main` could hear it
        code = STOPPED
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a terminal that was closed
            stream.flush()
    return code


if __name__ == "__main__":
    # A rank that failed must not wait for the others in an interpreter shutdown hook: the launcher ends them.
    os._exit(run_process())
