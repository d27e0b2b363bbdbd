"""The checks of a cluster, of this host for a job, and before a launch."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from capt.launcher import environment
from capt.launcher.plan import DEFAULT_PORT, Launch, Options, Plan
from capt.launcher.preflight import limits, probe
from capt.launcher.preflight.compare import compare
from capt.launcher.preflight.report import SWITCH, Check, refuse
from capt.launcher.preflight.survey import existing, survey
from capt.launcher.ssh import Host
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.registry import task_module


def check_cluster(
    hosts: tuple[Host, ...], *, run_dir: Path, job: Job | None, address: str | None, port: int
) -> list[Check]:
    """Everything about the hosts of a job, asked of all in parallel; ``job`` None where none is known.

    Raises:
        ConfigError: the variables that would be forwarded to the hosts are not safe.
    """
    inherited = environment.inherited()
    forwarded = environment.forwarded_to_hosts(inherited, (Path.home(), Path()))
    found = survey(
        hosts,
        run_dir=run_dir,
        address=address or hosts[0].name,
        port=port,
        environment=inherited,
        forwarded=forwarded,
    )
    return [*compare(found), *_disk(job)]


def check_here(job: Job, slots: int, port: int | None = None) -> list[Check]:
    """What ``slots`` processes of a job need of this host; milliseconds, and no process is started.

    ``port`` is that of the rendezvous, where the user has chosen one.
    """
    checks = [*_folder(job.run.dir), *_disk(job)]
    checks += limits.shared_memory(*probe.shared_memory(), slots)
    checks += limits.descriptors(probe.descriptors())
    checks += limits.apex(*probe.apex(sys.path))
    if port is not None:
        checks += _port(port)
    return checks


def examine_for(config: str | None, overrides: Sequence[str], options: Options) -> list[Check]:
    """The checks of ``capt doctor`` beside those of this machine: for a job, for the hosts of a hostfile, or none.

    Raises:
        ConfigError: the job or the hostfile is wrong.
    """
    job = load_job(config, overrides) if config is not None else None
    if options.hostfile is None:
        return check_here(job, 1, options.master_port) if job is not None else []
    hosts = options.hosts()
    return check_cluster(
        hosts,
        run_dir=job.run.dir if job is not None else Path(),
        job=job,
        address=options.master_addr,
        port=options.master_port or DEFAULT_PORT,
    )


def before_launch(launch: Launch, plan: Plan, switch: str = SWITCH) -> dict[Path, str]:
    """Check the hosts of a launch; those of Slurm and Ray are not known before they run the job.

    Returns the files to put into the run folder: what is predicted of the job on GPUs, for the report.

    Raises:
        ConfigError: something would stop the job. One line, with the remedy and the ``switch`` that skips the checks.
    """
    job, options = launch.job, launch.options
    if plan.examined == "ssh":
        assert plan.master_port is not None
        address, port = options.master_addr, plan.master_port
        hosts = (*plan.hosts, *plan.spares)
        refuse(check_cluster(hosts, run_dir=launch.run_dir, job=job, address=address, port=port), switch)
        cards, _ = probe.gpus()  # the hosts have the same
    elif plan.examined == "here":
        held = plan.launcher == "local" and not options.master_port  # the launcher itself holds the port that it chose
        refuse(check_here(job, plan.world, None if held else plan.master_port), switch)
        cards, _ = probe.gpus()
    else:
        return {}
    return predicted(launch, plan.world, cards)


def predicted(launch: Launch, world: int, cards: Sequence[Sequence[str]]) -> dict[Path, str]:
    """The prediction for ``world`` GPUs like the first of ``cards``; nothing where there are none of a known kind.

    Raises:
        ConfigError: the job needs more memory than such a GPU has.
    """
    if not cards or not (memory := _MIB.fullmatch(cards[0][1])):
        return {}
    from capt.pretrain.base.quiet import quiet_libraries

    quiet_libraries(debug=False)
    from capt.pretrain.plan.devices import Cluster, device_named
    from capt.pretrain.plan.predict import PLAN, predict, require_fit

    device = device_named(cards[0][0])
    if device is None or task_module(launch.job.task.type, "plan") is None:
        return {}
    found = predict(launch.job, Cluster(world, replace(device, memory=float(int(memory[1]) << 20))))
    if not found.step.longest:  # else most batches need less
        require_fit(found, launch.job)
    return {launch.run_dir / PLAN: json.dumps(found.to_json(), indent=1) + "\n"}


_MIB = re.compile(r"(\d{1,9}) MiB", re.ASCII)
"""Memory as nvidia-smi writes it."""


def _folder(run_dir: Path) -> Iterator[Check]:
    folder = existing(run_dir)
    mine = folder / f".preflight-{secrets.token_hex(8)}"
    try:
        probe.write(str(mine), "")
    except OSError as error:
        finding = f"{folder} cannot be written: {probe.problem(error)}"
        yield Check("run folder", "fail", finding, "run.dir in a folder that is yours")
    finally:
        probe.remove()


def _disk(job: Job | None) -> Iterator[Check]:
    if job is not None:
        folder = existing(job.run.dir)
        yield limits.disk(shutil.disk_usage(folder).free, *needed(job), str(folder))


def _port(port: int) -> Iterator[Check]:
    try:
        probe.server_on(port).close()
    except OSError as error:
        advice = "end what uses it, or take another --master-port"
        yield Check("rendezvous port", "fail", f"port {port}: {probe.problem(error)}", advice)


# How much room a job's checkpoints need: from those that it has, else estimated from its configuration.


def needed(job: Job) -> tuple[int | None, int]:
    """Bytes of one checkpoint (None where nothing tells), and how many more there will be at the same time.

    ``checkpoint.keep`` stay while the next one is written, and the best one may be a further one. Those that a resumed
    run has already are not counted again, but there is always one more to write.
    """
    have = sorted(path.parent for path in (job.run.dir / "checkpoints").glob("step-*/manifest.json"))
    copies = job.checkpoint.keep + 1 + (job.checkpoint.best is not None) - len(have)
    one = sum(file.stat().st_size for file in have[-1].rglob("*") if file.is_file()) if have else job.checkpoint_bytes()
    return one, max(1, copies)
