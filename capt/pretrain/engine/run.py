"""Takes a validated job to a finished run: process group, folder, checkpoint to resume from, data, train, status."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError, MachineError, RunFailedError, quoted
from capt.pretrain.base.process import affinity, cpu_quota, notes_on_cores, thread_share
from capt.pretrain.config.contrast import ContrastSection
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.branch import branched
from capt.pretrain.engine.callbacks import default_callbacks, user_callbacks
from capt.pretrain.engine.callbacks.agreement import TrainingDivergedError
from capt.pretrain.engine.callbacks.averager import write_average
from capt.pretrain.engine.checkpoint import (
    find_checkpoint,
    load_engine,
    load_module_weights_together,
    read_job,
    read_manifest,
    read_metadata,
    verify_together,
)
from capt.pretrain.engine.checkpoint.layout import SpikeState, point, set_aside
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.heartbeat import note_compilations
from capt.pretrain.engine.loop import NEVER, Callback, Run, train
from capt.pretrain.engine.provenance import is_processor
from capt.pretrain.engine.rank import check_precision, keep_freed_memory, with_precision
from capt.pretrain.engine.run_folder import DONE, PATIENCE, STOPPED, changed_keys, has_begun, resumes_by_itself
from capt.pretrain.engine.run_status import RunStatus, open_run_folder
from capt.pretrain.engine.step_folders import checkpoints_of, step_of
from capt.pretrain.engine.task import Progress, StepMetrics, Task
from capt.pretrain.registry import task_class

logger = logging.getLogger(__name__)

_SAME_LOSS = frozenset(
    (
        "checkpoint",
        "engine",
        "guard",
        "loader",
        "optimizer",
        "run",
        "schedule",
        "schema_version",
        "supervise",
        "validate",
    )
)
"""Sections whose keys change neither the loss nor the samples."""


_RIGHT_AFTER = 2
"""Steps after a resume in which a loss that is not a number is blamed on the checkpoint: a damaged moment of the
optimizer shows in the weights after the first, and in the loss of the second."""


class GivenUpError(RunFailedError):
    """The loss was not a number right after a resume; the next resume continues from an earlier checkpoint."""

    passing = True


def run_job(
    job: Job, *, resume: bool = False, checkpoint: str | None = None, skip_damaged: bool = False, wait: float = 0.0
) -> int:
    """Run a job on this rank and return its exit code (0 done, 75 stopped early but resumable).

    The run folder is taken before anything is loaded: a run that ends at any moment after that can be resumed, and a
    second job in the folder is refused immediately.

    Args:
        job: the validated configuration.
        resume: continue the run in ``job.run.dir`` from its newest checkpoint (or ``checkpoint``, a folder name); from
            step 0, where it has none yet. With ``run.resume=auto`` rank 0 decides it for all ranks, and nobody is there
            to help: the job waits for the folder, and passes over damaged checkpoints.
        checkpoint: name of a checkpoint folder under ``checkpoints/`` to resume from.
        skip_damaged: where the newest checkpoint is damaged, set it aside and resume from the newest that is whole. For
            a run that starts again by itself; else it is an error that names the previous one.
        wait: seconds for which the folder may still be held by another job: after a crash a file server keeps the locks
            of a lost node until its lease ends.
    """
    # The process: GPUs, threads, and the process group, in which ranks hear of each other's errors from here on.
    chosen = distributed.prepare_gpus(job.run.dir.absolute() / "collectives-rank-")
    if chosen:
        logger.info("set for the GPUs: %s", ", ".join(f"{name}={value}" for name, value in chosen.items()))
    _set_up_torch(job)
    distributed.initialize(job.engine.timeout_minutes)
    _set_threads(job.run.threads)
    with distributed.synchronize_errors():
        check_precision(job.engine.precision)
        callbacks = default_callbacks(job, user_callbacks(job, begun=has_begun(job.run.dir, job)))
    # A job that starts by itself waits for the folder, and may fetch the run from a store before it is opened.
    if job.run.resume == "auto" and not resume:
        skip_damaged, wait = True, max(wait, PATIENCE)
    with distributed.synchronize_errors(patient=True):
        if distributed.rank() == 0 and job.run.resume == "auto" and not resume:
            resumes_by_itself(job.run.dir, job)  # before anything is fetched into the run of another job
        for callback in callbacks:
            callback.before_folder(job, resumes=resume or job.run.resume == "auto")
    with open_run_folder(job, resume=resume, wait=wait) as status:
        resume = status.resumes  # with run.resume=auto the folder decides
        if status.branch is not None:
            with distributed.synchronize_errors():
                job = branched(job, status.branch)
        source = choose_checkpoint(job, checkpoint, callbacks, skip_damaged=skip_damaged) if resume else None
        _warn_of_lost_gpus(source)
        # Prepares tokenizer and data: one rank does the work, and the others wait for it by a lock.
        with distributed.synchronize_errors(patient=True):
            task = task_class(job.task.type)(job, job.run.dir)
        # The task may have filled in what only the data decide, such as steps from epochs.
        job = task.job
        run = _build(job, task, source)
        with distributed.synchronize_errors():
            if run.progress.step > job.schedule.max_steps:  # the schedule of the run would no longer be the one it had
                raise ConfigError(
                    f"run.dir {run.dir}: {run.progress.step:,} steps are trained already, and this job ends at step "
                    f"{job.schedule.max_steps:,}; raise schedule.{_length_key(job)}, or resume from an older checkpoint"
                )
        # After all that may refuse the job, so that a refused resume leaves the run as it was.
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                status.write_config(job)
        if resume:
            for callback in callbacks:
                callback.on_resume(run, newest=checkpoint is None)
        status.progress, first = run.progress, run.progress.step
        if run.finished:
            logger.info("%s is done: all %d steps; %s", run.dir, run.progress.step, _continuation(job))
            write_average(run, again=False)  # the job may have been killed before it was done
            for callback in callbacks:
                callback.on_done(run)
            status.finish("done", DONE)
            return DONE
        try:
            return _train(run, status, callbacks)
        except TrainingDivergedError as error:  # right after a resume the checkpoint is to blame, not the training
            is_blamed = checkpoint is None and error.step <= first + _RIGHT_AFTER
            if source is None or not is_blamed or not (done := give_up(job.run.dir, source, callbacks)):
                raise
            raise GivenUpError(f"{error}. It came right after {source.name} was resumed: {done}") from error


def _warn_of_lost_gpus(source: Path | None) -> None:
    if source is None or distributed.rank() != 0 or torch.cuda.is_available():
        return
    had = read_manifest(source).provenance.get("hardware", "")
    if had and not is_processor(had):
        logger.warning("the run has trained on %s, and CUDA finds no GPU here: it continues on processors", had)


def _continuation(job: Job) -> str:
    """Say how a run that is done may be continued."""
    if job.run.branch_from is not None and job.schedule.type == "wsd" and job.schedule.decay_steps:
        return f"its decay has ended; branch again from {job.run.branch_from} for one of other schedule.decay_steps"
    return f"raise schedule.{_length_key(job)} to continue"


def _length_key(job: Job) -> str:
    return "max_steps" if getattr(job.schedule, "epochs", None) is None else "epochs"


def _build(job: Job, task: Task, source: Path | None) -> Run:
    """Build modules and engines, from the seed or from a checkpoint. Collective."""
    if job.engine.precision == "auto":
        logger.info("engine.precision auto: %s", with_precision(job).engine.precision)
    with distributed.synchronize_errors():
        modules = task.build_modules()
    # Building the modules may have loaded the compiler.
    note_compilations()
    # Before the engines, which make their master copies from these weights.
    if source is not None:
        for name, module in modules.items():
            load_module_weights_together(source, name, module)
    engines = build_engines(modules, job, task.optimizers())
    progress, spikes = Progress(), SpikeState()
    if source is not None:
        with distributed.synchronize_errors():
            state = read_metadata(source)
            if lacking := engines.keys() - state.engines.keys():
                raise CheckpointError(f"{source}: its state.json says nothing of {', '.join(sorted(lacking))}")
        progress = Progress(**state.progress.model_dump())
        for name, engine in engines.items():
            load_engine(source, engine, state.engines[name])
        with distributed.synchronize_errors(patient=True):
            task.load_state(source, state.task)
        logger.info("resuming from %s at step %d", source, progress.step)
        # Beside losses of another kind the first of the coming ones would look like a spike.
        spikes = state.spikes if _has_same_loss(source, job) else state.spikes.model_copy(update={"past": {}})
    return Run(job, job.run.dir, task, engines, progress, source, spikes=lambda: spikes)


class _StatusCallback(Callback):
    """Comes last: when all other callbacks have started, the first step is next. It also counts lost checkpoints."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status

    def on_start(self, run: Run) -> None:
        self._status.start_training()

    def after_step(self, run: Run, report: StepMetrics) -> None:
        self._status.record_failed_saves(run.failed_saves)

    def next_due(self, run: Run) -> int:
        return NEVER


def _train(run: Run, status: RunStatus, callbacks: Sequence[Callback]) -> int:
    train(run, [*callbacks, _StatusCallback(status)])
    if run.finished:
        status.finish("done", DONE)
        return DONE
    logger.info(
        "stopped at step %d: %s; continue with: capt resume %s", run.progress.step, run.stopping, quoted(run.dir)
    )
    status.finish("stopped", STOPPED, run.stopping)
    return STOPPED


def _has_same_loss(source: Path, job: Job) -> bool:
    """Return whether the loss of the coming steps compares with that of the steps before. Rank 0 reads. Collective."""
    same = None
    with distributed.synchronize_errors():
        if distributed.rank() == 0:
            same = _compare_losses(source, job)
    return bool(distributed.broadcast_object(same))


def _compare_losses(source: Path, job: Job) -> bool:
    saved = read_job(source)
    changed = [key for key in changed_keys(saved, job) if key.partition(".")[0] not in _SAME_LOSS]
    before, ranks = read_manifest(source).world_size, distributed.world_size()
    then, now = _sequences_of_a_loss(saved, before), _sequences_of_a_loss(job, ranks)
    if then != now:
        logger.warning(
            "batch.micro x ranks is %d, it was %d: a loss over the sequences of a forward pass (in-batch negatives) "
            "now sees another number of them; batch.micro=%g keeps it", now, then, then / ranks,
        )  # fmt: skip
    return then == now and not set(changed) - {"batch.micro"}


def _sequences_of_a_loss(job: Job, ranks: int) -> int:
    """Sequences that an in-batch loss compares: of a forward pass on all ranks, or of a step with a cached contrast."""
    contrast = getattr(job, "contrast", None)
    if isinstance(contrast, ContrastSection) and contrast.is_cached(job.accumulation(ranks)):
        return job.batch.global_
    return ranks * job.micro_batch(ranks)


def _set_threads(threads: int) -> None:
    """Set the CPU threads of this rank: ``threads``, or with 0 its part of the host's cores. Collective."""
    if not threads:
        mine, host, quota = sorted(affinity()), socket.gethostname(), cpu_quota()
        # Every rank takes part, for OMP_NUM_THREADS may be set on some hosts alone.
        masks = [mask for name, mask in distributed.gather_objects((host, mine)) if name == host]
        given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        threads = int(given) if given.isdigit() and int(given) else thread_share(mine, masks, quota)
        if distributed.rank() == 0 and not torch.cuda.is_available():
            for line in notes_on_cores(threads, len(masks), quota, len(mine), os.getloadavg()[0], os.cpu_count() or 1):
                logger.info("%s", line)
    torch.set_num_threads(threads)


def _set_up_torch(job: Job) -> None:
    if not torch.cuda.is_available():
        keep_freed_memory()
    if job.run.deterministic:  # only then: the call alone imports the compiler stack
        torch.use_deterministic_algorithms(True)


_DISAGREE = 90.0
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
        CheckpointError: on all ranks: the checkpoint is damaged, and no callback has a whole copy; the text offers the
            previous one.
        MachineError: the ranks do not see the same run folder.
    """
    mended: set[Path] = set()
    while True:
        source = _newest_permanent(job.run.dir) if name is None else _named(job.run.dir, name)
        if name is None:
            after = -1 if source is None else step_of(source)
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
            if error.passing:  # a file server that is away is no damage
                raise
            if source not in mended and _mend(job, source, error, callbacks):
                mended.add(source)
            # One that was named is not replaced by another.
            elif not skip_damaged or name is not None or not _pass_over(source, error):
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
            # What follows `diverged-`, a name that sorts by its step.
            before = [path for path in source.parent.glob("diverged-step-*") if path.name[9:] > source.name]
            if older and source.parents[1] != run_dir:
                if any(callback.give_up(run_dir, source) for callback in callbacks):
                    done = f"{source.name} of the hosts' memory is given up"
            elif older and not before:
                # The link first, so that it leads to a checkpoint at every moment.
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
    """Return what ``look`` finds, once all ranks find the same: a host may see a change late. Collective."""
    until, logged = time.monotonic() + _DISAGREE, False
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
                raise MachineError(differ)
        if distributed.rank() == 0 and not logged:
            logger.warning("%s; waiting up to %.0f s for the file system", differ, _DISAGREE)
        logged = True
        time.sleep(_PAUSE)


def _mend(job: Job, source: Path, error: CheckpointError, callbacks: Sequence[Callback]) -> bool:
    """Let callbacks put a whole copy in the place of a damaged checkpoint. Collective."""
    done = False
    with distributed.synchronize_errors(patient=True):
        if distributed.rank() == 0 and any(callback.mend(job, source) for callback in callbacks):
            logger.error("%s. A whole copy of it is put in its place", str(error).partition(";")[0])
            done = True
    return bool(distributed.broadcast_object(done))


def _pass_over(source: Path, error: CheckpointError) -> bool:
    """Set a damaged checkpoint aside, where the run has an older one. Collective."""
    done = False
    with distributed.synchronize_errors():
        if distributed.rank() == 0 and (older := [p for p in checkpoints_of(source.parents[1]) if p != source]):
            # The link first, so that it leads to a checkpoint at every moment.
            point("latest", older[-1])
            kept = set_aside(source, "damaged")
            logger.error("%s. The run starts again by itself, from %s; %s is kept", error, older[-1].name, kept)
            done = True
    return distributed.broadcast_object(done)
