"""A Slurm batch script: supervised in its allocation, saved before the time limit, queued again until it is done.

``sbatch`` would hand the whole environment to the job, and Slurm keeps it on its controller. Here the job gets what
is forwarded (``capt.launcher.environment``) and what a login shell sets on the node.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from capt.launcher import environment
from capt.launcher.backends.hosts import check_spares
from capt.launcher.cluster import SlurmCluster, load_cluster
from capt.launcher.plan import Command, End, Launch, Plan
from capt.launcher.ssh import Host
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import require_own_folder
from capt.pretrain.config.reader import as_override
from capt.pretrain.engine.run_folder import DONE, FAILED

# %j is the job id. A login shell knows `module`, which else is a function of the environment;
# it and conda's hooks use unset variables, so -u comes after them.
_SCRIPT = """\
#!/bin/bash -l
{directives}

cd {here} || exit 1
{setup}
set -uo pipefail

trap : TERM USR1 # this shell waits for the job, which has the signal as well
{python} -m capt.launcher.batch {module} {arguments}
code=$?
{after}
exit "$code"
"""
_REQUEUE = """\
if {after} {restarts}; then
  scontrol requeue "$SLURM_JOB_ID"
fi"""
SCRIPT = "job.sbatch"
_TASK = '"$SLURM_ARRAY_TASK_ID"'
# What the script itself needs; a login shell sets the rest.
_SITE = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "USER")

SPARES = True
"""Hosts beyond ``--nodes`` are spares."""


def plan(launch: Launch) -> Plan:
    """The batch script as a file of the run folder, and the ``sbatch`` command.

    Raises:
        ConfigError: ``--hostfile`` or ``--nproc`` is given, or the cluster file is wrong.
    """
    options = launch.options
    if options.hostfile is not None or options.nproc is not None:
        given = "--hostfile" if options.hostfile else "--nproc"
        raise ConfigError(f"{given} does not go with --launcher slurm: nodes and ranks are set in the --cluster file")
    cluster = load_cluster(options.cluster or Path("slurm"))
    script = (launch.run_dir / SCRIPT).resolve()
    listed = tuple(Host(f"node-{index}", cluster.ranks_per_node) for index in range(cluster.nodes))
    if options.nodes is not None and options.nodes > len(listed):
        raise ConfigError(f"--nodes {options.nodes}: the cluster file asks for only {len(listed)}")
    hosts, spares = listed[: options.nodes], listed[options.nodes :] if options.nodes is not None else ()
    check_spares(launch, listed, spares, "the cluster file")
    return Plan(
        "slurm",
        hosts,
        (Command(("sbatch", f"--export={','.join(_exported())}", str(script))),),
        files={**launch.files, script: render(launch, cluster)},
        spares=spares,
        blocked_reason=""
        if shutil.which("sbatch")
        else "there is no sbatch here; run this on a login node of the cluster",
    )


def start(launch: Launch, plan: Plan) -> End:
    """Submit the script; returns as soon as Slurm has queued it."""
    (command,) = plan.commands
    require_own_folder(launch.run_dir / "log", error=ConfigError)
    (launch.run_dir / "log").mkdir(parents=True, exist_ok=True)
    code = subprocess.run(command.argv, check=False).returncode
    return End(DONE) if code == 0 else End(FAILED, f"sbatch ended with {code}")


def _exported() -> list[str]:
    """The names of the variables that the job gets from here."""
    inherited = environment.inherited()
    return sorted({*environment.forwarded_env(inherited), *(name for name in _SITE if name in inherited)})


def render(launch: Launch, cluster: SlurmCluster) -> str:
    """The batch script of a job on a cluster."""
    run_dir = launch.run_dir.resolve()
    python = shlex.quote(sys.executable)
    arguments, folder = shlex.join(_begun_or_resumed(launch.arguments)), shlex.quote(str(run_dir))
    if cluster.array_key is not None:
        if "--resume" in launch.arguments:
            raise ConfigError("array_key begins runs of their own: resume one of them with a cluster file without it")
        if as_override("run.dir", str(run_dir)) != f"run.dir={run_dir}":
            raise ConfigError(f"run.dir {run_dir}: array_key adds to it; take a path that needs no quotes in YAML")
        folder += f"/{_TASK}"
        arguments += f" {cluster.array_key}={_TASK} {shlex.quote(f'run.dir={run_dir}')}/{_TASK}"
    after = f'{python} -m capt.launcher.requeue {folder} "$code"'
    # A job that stopped at schedule.stop_after has done what it was asked to.
    requeue = cluster.requeue and launch.job.schedule.stop_after is None
    survives = launch.job.supervise.on_lost_node != "wait"
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in _directives(cluster, run_dir, requeue, survives)),
        here=shlex.quote(str(Path.cwd())),
        setup="".join(f"{line}\n" for line in cluster.setup),
        arguments=arguments,
        python=python,
        module=launch.module,
        after=_REQUEUE.format(after=after, restarts=cluster.restarts) if requeue else after,
    )


def _begun_or_resumed(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments that begin the run, and continue it when the job is queued again."""
    return arguments if "--resume" in arguments else (*arguments, "--resume=auto")


def _directives(cluster: SlurmCluster, run_dir: Path, requeue: bool, survives: bool) -> list[str]:
    """``survives``: the allocation outlives a lost node."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", run_dir.name)
    settings = {
        "job-name": f"capt-{name}",
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.ranks_per_node,
        "cpus-per-task": cluster.cpus_per_rank,
        "gpus-per-node": cluster.gpus_per_node,
        "time": cluster.time,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "array": cluster.array,
        "output": f'"{_checked(run_dir)}/log/slurm-%j.log"',
        "open-mode": "append",
        "signal": f"USR1@{cluster.save_before_end}",
    }
    flags = ["--requeue"] * requeue + ["--no-kill"] * survives
    return [*(f"--{key}={value}" for key, value in settings.items() if value), *flags, *cluster.extra]


def _checked(run_dir: Path) -> Path:
    if re.search(r'["\\%]|[^ -~]', str(run_dir)):
        raise ConfigError(
            f"run.dir {run_dir}: Slurm's --output takes no quote, backslash, percent sign or control character"
        )
    return run_dir
