"""The checks of a cluster, of this host for a job, and before a launch: hosts are asked, and their answers compared."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from capt.launcher import environment
from capt.launcher.plan import DEFAULT_PORT, Launch, Options, Plan
from capt.launcher.preflight import limits, probe
from capt.launcher.preflight.facts import Facts, Findings, Survey
from capt.launcher.preflight.probe import PACKAGES
from capt.launcher.preflight.report import SWITCH, Check, refuse
from capt.launcher.preflight.survey import existing, survey
from capt.launcher.ssh import Host
from capt.pretrain.base.errors import counted
from capt.pretrain.base.process import host_memory
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.registry import task_module

_CLOCK_WARN, _CLOCK_FAIL = 0.5, 5.0
"""Seconds by which a clock is surely off: file times mislead above the first, leases and locks above the second."""
_KEY_CHANGED = re.compile(r"HOST IDENTIFICATION HAS CHANGED")
_KEY_UNKNOWN = re.compile(r"Host key verification failed|host key is known")
_LOGIN = re.compile(r"Permission denied|Too many authentication failures|Authenticated? failed", re.I)
_NO_SSH = re.compile(r"^ssh cannot be started")


def compare(survey: Survey) -> list[Check]:
    """Compare the answers of all hosts: each fault with its remedy. A check that no host has answered does not pass."""
    groups: tuple[tuple[str, Callable[[Survey], Iterator[Check]]], ...] = (
        ("reachable", reach),
        ("versions", versions),
        ("working folder", working_folder),
        ("run folder", run_folder),
        ("rendezvous", limits.rendezvous),
        ("interfaces", limits.interfaces),
        ("clocks", clocks),
        ("GPUs", same_gpus),
        ("limits of each host", each_host),
    )
    found = []
    for name, judge in groups:
        checks = list(judge(survey))
        if not checks and _judged(name, survey):
            checks = [Check(name, "ok", _FINE[name](survey))]
        found += checks or [Check(name, "warn", "not looked at: too few hosts have answered", "first reach them")]
    return found


def _judged(name: str, survey: Survey) -> bool:
    """Return true where a check had something to judge: hosts that answer, and a rendezvous that was tried."""
    return any(one.meeting for one in survey.hosts) if name == "rendezvous" else any(_known(survey))


def _known(survey: Survey) -> Iterator[tuple[Findings, Facts]]:
    return ((one, one.facts) for one in survey.hosts if one.facts is not None)


def reach(survey: Survey) -> Iterator[Check]:
    """A host that does not answer, by what ssh has said."""
    for one in survey.hosts:
        host, said = one.host.name, one.lost
        if not said:
            continue
        if _NO_SSH.search(said):
            yield Check(
                "ssh", "fail", said, "install the client (Debian and Ubuntu: apt-get install openssh-client)", host
            )
        elif _KEY_CHANGED.search(said):
            advice = (
                f"if {host} was set up anew: ssh-keygen -R {host}, then ssh {host} true; else somebody is in between"
            )
            yield Check("host key", "fail", f"another one than before: {said}", advice, host)
        elif _KEY_UNKNOWN.search(said):
            advice = f"ssh {host} true once by hand, and compare the fingerprint"
            yield Check("host key", "fail", f"not known: {said}", advice, host)
        elif _LOGIN.search(said):
            yield Check("login", "fail", said, f"ssh-copy-id {host}; the login must ask nothing", host)
        # What a shell returns where it cannot run the Python.
        elif one.exit_code in (126, 127):
            yield Check("Python", "fail", said, "the same environment at the same path on every host", host)
        # None: ssh did not end by itself; 255: it failed itself.
        elif one.exit_code in (None, 255):
            advice = f"is it on, and its sshd? then ssh {host} true; or take it out of the hostfile"
            yield Check("reachable", "fail", said, advice, host)
        else:
            advice = "the same environment at the same path on every host, and a login shell that ends nothing"
            yield Check("Python", "fail", f"it does not run there: {said}", advice, host)


def versions(survey: Survey) -> Iterator[Check]:
    """The same Python, torch, DeepSpeed and files of ours as on the host that asks."""
    here = survey.here
    for one, facts in _known(survey):
        host = one.host.name
        if facts.python != here.python:
            other = facts.python.split(".")[:2] != here.python.split(".")[:2]
            advice = "the same Python on every host"
            yield Check("python", "fail" if other else "warn", f"{facts.python}, here {here.python}", advice, host)
        for name in PACKAGES:
            there, mine = facts.packages.get(name, ""), here.packages.get(name, "")
            if there != mine:
                advice = f"pip install '{name}=={mine}' there" if mine else f"pip uninstall {name} there"
                yield Check(name, "fail", f"{there or 'not installed'}, here {mine or 'not installed'}", advice, host)
        # Another release has been reported above; this finds other files of the same one.
        if facts.sources != here.sources and facts.packages.get(PACKAGES[-1]) == here.packages.get(PACKAGES[-1]):
            finding = "other files of the same release" if facts.sources else "pretrain cannot be imported"
            yield Check("sources", "fail", finding, "the same commit on every host, or one checkout that all see", host)


def working_folder(survey: Survey) -> Iterator[Check]:
    """Ranks start in the folder in which the launch was typed."""
    for one, facts in _known(survey):
        if not facts.folder:
            advice = "start from a folder that every host has at the same path"
            yield Check("working folder", "fail", "it is not there", advice, one.host.name)


def run_folder(survey: Survey) -> Iterator[Check]:
    """Every host writes there, and sees what this host writes, and the other way round."""
    folder = survey.folder
    if survey.here_writes:
        advice = "run.dir in a folder that is yours"
        yield Check("run folder", "fail", f"{folder} cannot be written from here: {survey.here_writes}", advice)
        return
    shared = "run.dir on a file system that all hosts mount at the same path"
    for one in survey.hosts:
        host = one.host.name
        if one.writes:
            yield Check("run folder", "fail", f"{folder} there: {one.writes}", shared, host)
        elif one.blind:
            yield Check("run folder", "fail", f"what is written here into {folder} is not seen there", shared, host)
        elif one.unseen:
            yield Check("run folder", "fail", f"what is written there into {folder} is not seen here", shared, host)


def clocks(survey: Survey) -> Iterator[Check]:
    """Clocks that are surely off: the offset less the bound of its error, which is half the round trip."""
    for one in survey.hosts:
        clock = one.clock
        if clock is None or (sure := abs(clock.offset) - clock.bound) <= _CLOCK_WARN:
            continue
        finding = f"{clock.offset:+.2f} s against this host's clock (within {clock.bound:.3f} s)"
        yield Check(
            "clock",
            "fail" if sure > _CLOCK_FAIL else "warn",
            finding,
            "chrony or systemd-timesyncd on every host: timedatectl set-ntp true",
            one.host.name,
        )


def same_gpus(survey: Survey) -> Iterator[Check]:
    """GPUs on all hosts or on none, of one model, with one driver."""
    hosts = [(one.host.name, facts) for one, facts in _known(survey) if not facts.gpu_problem]
    without = [name for name, facts in hosts if not facts.gpus]
    if len(without) not in (0, len(hosts)):
        advice = "take it out of the hostfile, or start it with its GPUs (docker run --gpus all)"
        yield from (Check("GPUs", "fail", "none, but other hosts have some", advice, name) for name in without)
    for column, what in ((0, "model"), (2, "driver")):
        kinds = {
            name: {card[column] for card in facts.gpus if len(card) > column} for name, facts in hosts if facts.gpus
        }
        common = Counter(kind for each in kinds.values() for kind in each).most_common(1)
        for name, each in kinds.items():
            if others := sorted(each - {common[0][0]}):
                finding = f"{what} {', '.join(others)}, elsewhere {common[0][0]}"
                advice = "all ranks wait for the slowest" if column == 0 else "the same driver on every host"
                yield Check("GPUs", "warn", finding, advice, name)


def each_host(survey: Survey) -> Iterator[Check]:
    """Shared memory, open files, apex and the number of GPUs of every host."""
    for one, facts in _known(survey):
        yield from limits.limits(facts, one.host.slots, one.host.name)
    kinds = {one.host.name: facts.apex for one, facts in _known(survey) if facts.apex != "unrelated"}
    if len(set(kinds.values())) > 1:
        finding = "apex is " + ", ".join(f"{kind} on {name}" for name, kind in kinds.items())
        yield Check("apex", "warn", finding, "the same on every host, or set optimizer.backend=torch")


def _hosts(survey: Survey) -> str:
    return counted(len([*_known(survey)]), "host")


_FINE: dict[str, Callable[[Survey], str]] = {
    "reachable": lambda survey: f"{_hosts(survey)}, by known host keys",
    "versions": lambda survey: ", ".join(
        [f"python {survey.here.python}", *(f"{name} {version}" for name, version in survey.here.packages.items())]
    ),
    "working folder": lambda survey: f"on {_hosts(survey)}",
    "run folder": lambda survey: f"{survey.folder} is shared and writable",
    "rendezvous": lambda survey: f"{survey.address} port {survey.port} is free and reached by {_hosts(survey)}",
    "interfaces": lambda survey: ", ".join(
        sorted({one.meeting.interface or one.meeting.own for one in survey.hosts if one.meeting})
    ),
    "clocks": lambda survey: f"within {_CLOCK_WARN} s of this host's",
    "GPUs": lambda survey: (
        ", ".join(
            f"{n} x {card}"
            for card, n in Counter(card[0] for _, facts in _known(survey) for card in facts.gpus).items()
        )
        or "none; jobs run on the processors over gloo"
    ),
    "limits of each host": lambda survey: f"shared memory, open files, apex, GPUs of {_hosts(survey)}",
}


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
    """Check this host for ``slots`` processes of a job; it takes milliseconds and starts no process.

    ``port`` is that of the rendezvous, where the user has chosen one.
    """
    checks = [*_folder(job.run.dir), *_memory(job), *_disk(job)]
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
    """The prediction for ``world`` GPUs like the first of ``cards``; nothing of an unknown kind or an unplanned job.

    Raises:
        ConfigError: the job needs more memory than such a GPU has.
    """
    if not cards or not (memory := _MIB.fullmatch(cards[0][1])):
        return {}
    from capt.pretrain.base.quiet import quiet_libraries

    quiet_libraries(debug=False)
    from capt.pretrain.plan.devices import Cluster, device_named
    from capt.pretrain.plan.predict import PLAN, predict, require_fit
    from capt.pretrain.plan.rehearsal import UnplannedError

    device = device_named(cards[0][0])
    if device is None or task_module(launch.job.task.type, "plan") is None:
        return {}
    try:
        found = predict(launch.job, Cluster(world, replace(device, memory=float(int(memory[1]) << 20))))
    except UnplannedError:
        return {}
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


def _memory(job: Job) -> Iterator[Check]:
    need = job.queue_bytes()
    # The memory of GPUs is asked by the ranks, before anything is allocated.
    if need is not None and not probe.gpus()[0]:
        yield from limits.queue_memory(need, host_memory())


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
    have = checkpoints_of(job.run.dir)
    copies = job.checkpoint.keep + 1 + (job.checkpoint.best is not None) - len(have)
    one = sum(file.stat().st_size for file in have[-1].rglob("*") if file.is_file()) if have else job.checkpoint_bytes()
    return one, max(1, copies)
