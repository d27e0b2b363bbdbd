"""Starts processes for every command: a job from its CONFIG (or only shows it), or ranks that share other work."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from capt.launcher.backends import WORK_LAUNCHERS, backend
from capt.launcher.plan import Backend, End, Launch, LaunchFiles, Options, Plan, describe, job_file
from capt.launcher.preflight.run import before_launch
from capt.launcher.restart import outlast, supervise
from capt.launcher.ssh import is_this_host
from capt.launcher.watch import StatusWatch
from capt.pretrain.base.errors import ConfigError, MachineError, counted, machines_at_fault, quoted
from capt.pretrain.config.base import NO_TEXT
from capt.pretrain.config.load import job_from_mapping, load_job, load_mapping, parse_mapping
from capt.pretrain.config.reader import as_override, to_yaml
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.branch import branch_point, branched
from capt.pretrain.engine.engines.deepspeed_config import deepspeed_config
from capt.pretrain.engine.run_folder import (
    BAD_INPUT,
    CONFIG,
    DONE,
    FAILED,
    STOPPED,
    check_folders,
    has_begun,
    holds_run,
    is_finished,
    require_run,
    resumes_by_itself,
)
from capt.pretrain.registry import check_callbacks, require_tracker

log = logging.getLogger(__name__)


def begin(
    module: str,
    config: str,
    overrides: Sequence[str],
    options: Options,
    *,
    debug: bool,
    show: Callable[[str], None] | None,
    finetunes: bool = False,
    preflight: bool = True,
) -> int:
    """Start a new run and return its exit code; with ``show`` (dry run) only describe what would be done.

    CONFIG, its base files, the overrides and the environment are merged here, once. The ranks read the merged job from
    a private file of the run folder. With ``finetunes`` a job that trains an encoder from scratch is refused. With
    ``preflight`` the hosts are examined first (``capt.launcher.preflight``).

    Raises:
        UserError: the job, the options or the hostfile is wrong, ``run.dir`` already holds a run (with
            ``run.resume=auto``: of another job), or what the job reads is not there.
    """
    text = to_yaml(load_mapping(config, overrides))
    job = job_from_mapping(parse_mapping(text, config), config)  # what the ranks are going to read
    if finetunes and job.pretrains:
        raise ConfigError(f"{config}: a {job.task.type} job trains a model of its own: capt pretrain {quoted(config)}")
    elsewhere = _runs_elsewhere(options)
    begun = not elsewhere and resumes_by_itself(job.run.dir, job)
    if begun and is_finished(job.run.dir, job) and show is None:
        log.info("%s is finished: all steps of this job are done", job.run.dir)
        return DONE
    with machines_at_fault(lambda: begun):
        return _begin(module, job, text, (config, *overrides), options, debug=debug, show=show, preflight=preflight)


def _begin(
    module: str,
    job: Job,
    text: str,
    given: Sequence[str],
    options: Options,
    *,
    debug: bool,
    show: Callable[[str], None] | None,
    preflight: bool,
) -> int:
    elsewhere = _runs_elsewhere(options)
    # What the job reads need not be here if its processes are not.
    inputs = [] if elsewhere else list(job.check_inputs())
    if not elsewhere and job.run.branch_from is not None and not holds_run(job.run.dir):
        branch = branched(job, branch_point(job.run.branch_from))
        inputs.append(f"branch: {branch.run.branch_from}, to step {branch.schedule.max_steps:,}")
    path, debugging = job_file(job.run.dir, text), ["--debug"] * debug
    launch = Launch(
        module,
        (str(path), "--merged", *debugging),
        job,
        options,
        inputs=tuple(inputs),
        files={path: text},
        unmerged=(*given, *debugging),
    )
    return _carry_out(launch, show, preflight)


def resume(
    module: str,
    run: Path,
    overrides: Sequence[str],
    options: Options,
    *,
    checkpoint: str | None,
    debug: bool,
    show: Callable[[str], None] | None,
    preflight: bool = True,
) -> int:
    """Continue the run in a folder, launched as it was before unless an option says otherwise.

    Raises:
        UserError: the folder holds no run, or no checkpoint of that name; or as ``begin``.
    """
    if NO_TEXT.search(str(run)):
        raise ConfigError(f"{str(run)!r}: a path holds no line break, NUL or other control character")
    config = run / CONFIG
    require_run(run)
    if checkpoint is not None:
        checkpoint = _named_checkpoint(run, checkpoint)
    job = load_job(config, overrides, resolved=True)
    if job.run.dir.resolve() != run.resolve():  # the folder was moved, or is reached by another path
        overrides = [*overrides, as_override("run.dir", str(run))]
        job = load_job(config, overrides, resolved=True)
    # The number of steps in the run's configuration is that of its epochs so far: the default has it computed anew.
    if _has_other_epochs(job, overrides):
        overrides = [*overrides, f"schedule.max_steps={type(job.schedule).model_fields['max_steps'].default}"]
        job = load_job(config, overrides, resolved=True)
    launched = Options()
    with suppress(ConfigError):
        launched = Options.read(run / "launch.json")
    begun, repeats = has_begun(run, job), options.repeat(launched)
    if options == Options():
        options = Options.read(run / "launch.json")
    chosen = ["--checkpoint", checkpoint] if checkpoint else []
    arguments = (str(config), *overrides, "--resume", *chosen, *["--debug"] * debug)
    with machines_at_fault(lambda: begun):
        inputs = tuple(job.check_inputs())
    with machines_at_fault(lambda: begun and repeats):
        return _carry_out(Launch(module, arguments, job, options, inputs=inputs), show, preflight)


def _has_other_epochs(job: Job, overrides: Sequence[str]) -> bool:
    """Return whether epochs are asked for and not steps: the run's steps were computed from its epochs so far."""
    keys = {override.partition("=")[0] for override in overrides}
    by_epochs = getattr(job.schedule, "epochs", None) is not None
    return by_epochs and "schedule.epochs" in keys and "schedule.max_steps" not in keys


def _carry_out(launch: Launch, show: Callable[[str], None] | None, preflight: bool) -> int:
    given = launch.options
    if given.hostfile is None and (given.include or given.exclude):
        raise ConfigError(
            f"--{'include' if given.include else 'exclude'} chooses hosts of a --hostfile, which is missing"
        )
    name = _launcher(given)
    # With the launcher's name filled in, ``capt resume`` launches in the same way.
    launch = replace(launch, options=launch.options.model_copy(update={"launcher": name}))
    chosen: Backend = backend(name)
    if launch.options.nodes is not None and not getattr(chosen, "SPARES", False):
        raise ConfigError(f"--nodes says which hosts are no spares; --launcher {name} has none")
    plan = chosen.plan(launch)
    _require_fitting_batch(launch, plan)
    if not _runs_elsewhere(launch.options):
        check_callbacks(launch.job.run.callbacks)
        for tracker in launch.job.run.callbacks:
            if not has_begun(launch.run_dir, launch.job):  # else its ranks warn of it
                require_tracker(tracker)
        check_folders(launch.job)
    if name == "local":
        _check_precision_here(launch.job.engine.precision)
    if show is not None:
        show(describe(launch, plan))
        return DONE
    if plan.blocked_reason:
        raise MachineError(plan.blocked_reason)
    if _runs_elsewhere(launch.options):  # neither its run folder nor its processes are here
        return chosen.start(launch, plan).code
    if preflight:
        plan = replace(plan, files={**plan.files, **before_launch(launch, plan)})
    # A launch that is resumed has other arguments, and may have other hosts.
    end = supervise(launch, lambda each: _attempt(chosen, each, plan if each is launch else chosen.plan(each)))
    if end.code == STOPPED:
        begun = holds_run(launch.run_dir)
        log.info(
            "stopped early; %s",
            f"continue with: capt resume {quoted(launch.run_dir)}" if begun else "nothing was begun",
        )
    return end.code


def _require_fitting_batch(launch: Launch, plan: Plan) -> None:
    """Refuse batch sizes that do not fit the ranks, before anything starts.

    Where the GPUs of this host say how many ranks there are, a run that has begun has lost some.
    """
    try:
        deepspeed_config(launch.job, plan.world)
    except ConfigError as error:
        options = launch.options
        by_gpus = plan.launcher in ("local", "torchrun") and options.nproc is None and options.hostfile is None
        raise (MachineError(str(error)) if by_gpus else error) from None


def carry_on(launch: Launch, chosen: Backend, *, name_of_job: str) -> int:
    """Carry out, in the allocation of a batch job or in its pods, a launch that was checked when it was submitted.

    ``name_of_job`` is the same when the batch job is queued again, so that its restarts are counted over all. A job
    whose nodes cannot be reached (any more) has stopped: queued again, it is given others.
    """
    begun = has_begun(launch.run_dir, launch.job)
    with machines_at_fault(lambda: begun):
        end = supervise(launch, lambda each: _attempt(chosen, each, chosen.plan(each)), name_of_job)
    return STOPPED if end.unreached else end.code


def _attempt(chosen: Backend, launch: Launch, plan: Plan) -> End:
    """Start a job, wait for its end, and see to it that its run folder tells how it ended."""
    options = {launch.run_dir / "launch.json": launch.options.to_json() + "\n"}
    watch, files = StatusWatch.begin(launch.run_dir), LaunchFiles(launch.run_dir, {**options, **plan.files})
    end = End(FAILED)
    try:
        files.write()
        where = f"{len(plan.hosts)} hosts" if len(plan.hosts) > 1 else plan.hosts[0].name
        log.info("%s: %s on %s, run folder %s", plan.launcher, counted(plan.world, "rank"), where, launch.run_dir)
        end = chosen.start(launch, plan)
        if end.code == FAILED and outlast(launch):
            end = replace(end, lost_host=True)  # nor does this say anything of the program
    finally:
        if end.code != DONE:
            watch.record_end(end.code, end.reason or f"the job ended with {end.code} and did not say why")
            files.remove(refused=end.code in (BAD_INPUT, STOPPED))
    return end


def start_work(module: str, file: Path, options: Options) -> int:
    """Run ``python -m MODULE FILE`` on the ranks that are asked for, and return the exit code. It is no job of a run.

    Raises:
        UserError: an option is wrong, or the hosts fail the preflight.
    """
    name = options.launcher or ("ssh" if options.hostfile else "local")
    if name not in WORK_LAUNCHERS:
        raise ConfigError(f"--launcher {name}: such work is started by {', '.join(WORK_LAUNCHERS)}")
    # Launchers start jobs: this one, of no task, brings them the folder, and a batch of one row for each rank.
    job = Job.model_validate(
        {
            "task": {"type": "none"}, "run": {"dir": str(file.parent)},
            "supervise": {"restarts": 0, "stall": None}, "batch": {"global": 1, "micro": 1},
        }
    )  # fmt: skip
    launch = Launch(module, (str(file),), job, options.model_copy(update={"launcher": name}))
    chosen: Backend = backend(name)
    plan = chosen.plan(launch)
    if plan.blocked_reason:
        raise ConfigError(plan.blocked_reason)
    job = job.model_copy(update={"batch": job.batch.model_copy(update={"global_": plan.world})})
    launch = replace(launch, job=job)
    before_launch(launch, plan, switch="")
    return chosen.start(launch, plan).code


def _named_checkpoint(folder: Path, name: str) -> str:
    """The name of the checkpoint. A link (``best``) is resolved, for it may lead elsewhere at a restart.

    Raises ``ConfigError`` where the run has none of that name.
    """
    found = sorted(path.parent.name for path in (folder / "checkpoints").glob("*/manifest.json"))
    if name not in found:
        have = f"it has {', '.join(found)}" if found else "it has no complete checkpoint"
        raise ConfigError(f"{folder} has no checkpoint {name!r}; {have}")
    target = (folder / "checkpoints" / name).resolve().name
    return target if target in found else name


def _check_precision_here(precision: str) -> None:
    """Check the precision on this host; the ranks of other hosts ask their own device, a login node cannot."""
    if precision == "fp16" or (precision in ("bf16", "bf16_pure") and shutil.which("nvidia-smi")):  # every CPU has bf16
        from capt.pretrain.base.quiet import quiet_libraries
        from capt.pretrain.engine.rank import check_precision

        quiet_libraries(debug=False)
        check_precision(precision)


def _runs_elsewhere(options: Options) -> bool:
    """Return whether only the job's ranks see its files, so that they find out what is missing."""
    return options.launcher is not None and bool(getattr(backend(options.launcher), "ELSEWHERE", False))


def _launcher(options: Options) -> str:
    if options.launcher is not None:
        return options.launcher
    if options.hostfile is None:
        return "slurm" if options.cluster else "local"
    hosts = options.hosts()
    if len(hosts) == 1 and is_this_host(hosts[0].name):
        log.info("%s names only this host: using --launcher local", options.hostfile)
        return "local"
    return "ssh"
