"""From a validated job to a finished run: folder, process group, restore, train, status."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from pretrain.config.schema import Job
from pretrain.engine import distributed
from pretrain.engine.allocator import keep_freed_memory
from pretrain.engine.callbacks import default_callbacks
from pretrain.engine.checkpoint import (
    find_checkpoint,
    read_job,
    read_manifest,
    read_metadata,
    restore_engine,
    restore_weights,
    verify,
)
from pretrain.engine.checkpoint.save import config_text
from pretrain.engine.engines import build_engines
from pretrain.engine.loop import Run, train
from pretrain.engine.precision import check_precision
from pretrain.engine.run_folder import BAD_INPUT, DONE, FAILED, STOPPED, check_is_free, held
from pretrain.engine.safe_files import write_json
from pretrain.engine.task import Progress
from pretrain.tasks import task_class
from tokenizer.errors import ConfigError, UserError

logger = logging.getLogger(__name__)


def run_job(job: Job, *, resume: bool = False, checkpoint: str | None = None) -> int:
    """Run a job on this rank and return its exit code (0 done, 75 stopped early but resumable).

    Args:
        job: the validated configuration.
        resume: continue the run in ``job.run.dir`` from its newest checkpoint (or ``checkpoint``, a folder name).
        checkpoint: name of a checkpoint folder under ``checkpoints/`` to resume from.
    """
    run_dir = job.run.dir
    check_precision(job.engine.precision)
    if not resume:
        check_is_free(run_dir)
    _set_threads(job)
    if not torch.cuda.is_available():
        keep_freed_memory()
    if job.run.deterministic:  # only then: the call alone imports the compiler stack
        torch.use_deterministic_algorithms(True)
    task = task_class(job.task.type)(job, run_dir)  # prepares tokenizer and data; ranks wait for each other by lock
    job = task.job
    distributed.initialize(job.engine.timeout_minutes)
    source = _choose_checkpoint(run_dir, checkpoint) if resume else None
    modules = task.build_modules()
    if source is not None:
        with distributed.agreed():
            for name, module in modules.items():
                restore_weights(source, name, module)
    engines = build_engines(modules, job)
    progress = Progress()
    if source is not None:
        with distributed.agreed():
            state = read_metadata(source)
            progress = Progress(**state["progress"])
            for name, engine in engines.items():
                restore_engine(source, engine, state["engines"][name])
            task.load_state(source, state["task"])
        logger.info("resuming from %s at step %d", source, progress.step)
        _warn_of_other_micro_batches(source, job)
    run = Run(job, run_dir, task, engines, progress)
    if run.finished:
        logger.info("%s is done: all %d steps; raise schedule.max_steps to go on", run_dir, progress.step)
        _write_status(run_dir, "done", progress.step, DONE)
        return DONE
    with _alone(run_dir):
        return _train(run)


@contextlib.contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """No other job may write into the folder: two would overwrite one another's checkpoints and mix their metrics."""
    with contextlib.ExitStack() as stack:
        with distributed.agreed():
            if distributed.rank() == 0:
                refusal = f"run.dir {run_dir}: another process is training in this folder; stop it, or name another one"
                stack.enter_context(held(run_dir, ".training", refusal))
        yield


def _train(run: Run) -> int:
    run_dir, progress = run.dir, run.progress
    _start_folder(run_dir, run.job)
    _write_status(run_dir, "running", progress.step, None)
    try:
        train(run, default_callbacks(run.job))
    except BaseException as error:
        code = BAD_INPUT if isinstance(error, UserError) else FAILED
        with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
            _write_status(run_dir, "failed", progress.step, code, f"{type(error).__name__}: {error}")
        raise
    if run.finished:
        _write_status(run_dir, "done", progress.step, DONE)
        return DONE
    logger.info("stopped at step %d: %s; continue with: capt resume %s", progress.step, run.stopping, run_dir)
    _write_status(run_dir, "stopped", progress.step, STOPPED, run.stopping)
    return STOPPED


def _choose_checkpoint(run_dir: Path, name: str | None) -> Path:
    with distributed.agreed():
        source = find_checkpoint(run_dir / "checkpoints" / name if name else run_dir)
    with distributed.agreed():
        verify(source)
    chosen = distributed.broadcast_object(str(source))
    with distributed.agreed():
        if chosen != str(source):
            raise ConfigError(f"run.dir {run_dir}: ranks see different checkpoints ({source} and {chosen})")
    return source


def _warn_of_other_micro_batches(source: Path, job: Job) -> None:
    then = read_manifest(source)["world_size"] * read_job(source).batch.micro
    now = distributed.world_size() * job.batch.micro
    if then != now:
        logger.warning(
            "batch.micro x ranks is %d, it was %d: a loss over the sequences of a forward pass (in-batch negatives) "
            "now sees another number of them; batch.micro=%g keeps it", now, then, then / distributed.world_size(),
        )  # fmt: skip


def changed_keys(old: Job, new: Job) -> list[str]:
    """Dotted keys whose values differ between two jobs."""

    def flat(value: object, prefix: str = "") -> dict[str, object]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {
            k: v for key, item in value.items() for k, v in flat(item, f"{prefix}.{key}" if prefix else key).items()
        }

    a, b = flat(old.model_dump(mode="json", by_alias=True)), flat(new.model_dump(mode="json", by_alias=True))
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def _start_folder(run_dir: Path, job: Job) -> None:
    with distributed.agreed():
        if distributed.rank() == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "checkpoints").mkdir(exist_ok=True)
            config = run_dir / "config.yaml"
            if config.exists():
                for key in changed_keys(read_job_of_run(run_dir), job):
                    logger.warning("%s differs from the run's configuration so far", key)
            config.write_text(config_text(job))
    logs = run_dir / "log"
    logs.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(logs / f"rank-{distributed.rank()}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def read_job_of_run(run_dir: Path) -> Job:
    """The configuration a run folder was started with (a run folder reads like a checkpoint)."""
    return read_job(run_dir)


def _write_status(run_dir: Path, state: str, step: int, code: int | None, reason: str = "") -> None:
    if distributed.rank() == 0:
        write_json(run_dir / "status.json", {"state": state, "step": step, "exit_code": code, "reason": reason})


def _set_threads(job: Job) -> None:
    torch.set_num_threads(job.run.threads or max(1, (os.cpu_count() or 1) // distributed.local_world_size()))
