"""Slurm: the cluster file, and a batch script whose job is saved before its time limit and queued again until done.

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
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from capt.launcher import environment
from capt.launcher.allocation import ARRAY_NUMBER, OWN_ID
from capt.launcher.backends.hosts import divide
from capt.launcher.plan import Command, End, Launch, Plan
from capt.launcher.ssh import Host, Slots
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import require_own_folder
from capt.pretrain.config.base import Section
from capt.pretrain.config.load import explain, load_mapping
from capt.pretrain.config.reader import as_override
from capt.pretrain.engine.run_folder import DONE, FAILED

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:&|()*=+@/-]{1,200}$")]


_Line = Annotated[str, Field(max_length=10_000)]
_Argument = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4096)]
_Directive = Annotated[str, Field(pattern=r"^--?[A-Za-z][^\x00-\x1f\x7f]*$", max_length=4096)]
_OWN_DIRECTIVES = {
    **{name: name for name in ("nodes", "time", "partition", "account", "qos", "constraint", "array")},
    "N": "nodes", "t": "time", "p": "partition", "A": "account", "q": "qos", "C": "constraint", "a": "array",
    "ntasks-per-node": "ranks_per_node", "gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_rank",
    "c": "cpus_per_rank", "ntasks": "nodes and ranks_per_node", "n": "nodes and ranks_per_node",
    "requeue": "requeue", "no-requeue": "requeue", "signal": "save_before_end",
    "output": "", "o": "", "open-mode": "", "export": "", "wrap": "",
}  # fmt: skip
"""Options of sbatch that other keys set, and those on which the script relies."""
_Count = Annotated[int, Field(ge=0, le=100_000)]


class SlurmCluster(Section):
    """Nodes, ranks and limits of a Slurm job (``capt/configs/cluster/slurm.yaml`` shows all keys).

    What is None or 0 is left to the cluster's own defaults.
    """

    model_config = ConfigDict(strict=True)

    nodes: Annotated[int, Field(ge=1, le=100_000)] = 1
    ranks_per_node: Slots = 1
    cpus_per_rank: _Count = 0
    gpus_per_node: _Count = 0
    time: _Word | None = None
    partition: _Word | None = None
    account: _Word | None = None
    qos: _Word | None = None
    constraint: _Word | None = None
    save_before_end: int = Field(
        120, ge=1, le=65535, description="seconds before the time limit at which the job saves and stops"
    )
    requeue: bool = Field(True, description="queue the job again when it stopped early or failed, so that it continues")
    restarts: int = Field(
        3,
        ge=0,
        le=1000,
        description="times that a job which failed is queued again, each after at least one more step",
    )
    setup: list[_Line] = Field(
        [], max_length=1000, description="shell lines run before the job (module load, source venv/bin/activate)"
    )

    extra: list[_Directive] = Field(
        [], max_length=1000, description="further options of sbatch, one each (--mem=0, --exclusive, --mail-type=END)"
    )
    array: Annotated[str, Field(pattern=r"^[0-9,:-]{1,200}(%[1-9][0-9]{0,5})?$")] | None = Field(
        None,
        description="tasks of a job array (sbatch --array): 1-8%1 continues one run after the other, where a cluster "
        "queues no job again; with array_key each task is a run of its own",
    )
    array_key: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,200}$")] | None = Field(
        None, description="key that each task sets to its number, such as run.seed; its run folder is run.dir/NUMBER"
    )
    srun: list[_Directive] = Field(
        [], max_length=1000, description="further options of srun on each node (--container-image=... of pyxis)"
    )
    container: list[_Argument] = Field(
        [], max_length=1000, description="words before Python on each node: [apptainer, exec, --nv, capt.sif]"
    )
    python: _Argument | None = Field(None, description="Python on the nodes, in the container; null = the same path")

    @model_validator(mode="after")
    def _array_shares_no_folder(self) -> SlurmCluster:
        if self.array_key is not None and self.array is None:
            raise ValueError("array_key needs array: the numbers of the tasks")
        if self.array is not None and self.array_key is None and not self.array.endswith("%1"):
            raise ValueError(
                f"array {self.array}: its tasks share a run folder: write %1 after it, so that one runs after the "
                "other, or set array_key"
            )
        return self

    @field_validator("extra")
    @classmethod
    def _own_directives_stay(cls, lines: list[str]) -> list[str]:
        for line in lines:
            name = line.lstrip("-").partition("=")[0].partition(" ")[0]
            if name in _OWN_DIRECTIVES:
                where = f"set {_OWN_DIRECTIVES[name]}" if _OWN_DIRECTIVES[name] else "the script relies on its own"
                raise ValueError(f"{line!r}: {where}")
        return lines

    @field_validator("setup")
    @classmethod
    def _one_line_each(cls, lines: list[str]) -> list[str]:
        for line in lines:
            if not line.replace("\t", " ").isprintable() or line.lstrip().startswith("#SBATCH"):
                raise ValueError(f"setup line {line!r}: one shell line an entry, and no #SBATCH directives")
        return lines


def load_cluster(path: Path) -> SlurmCluster:
    """Read a cluster file, or the shipped one of a bare name such as ``slurm``.

    Raises:
        ConfigError: the file is missing or malformed, or a key or value is not valid.
    """
    mapping = load_mapping(path)
    try:
        return SlurmCluster.model_validate(mapping)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, SlurmCluster)}") from None


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
  scontrol requeue {own_id}
fi"""
SCRIPT = "job.sbatch"
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
    options.refuse("slurm", "hostfile", "nproc", because="nodes and ranks are set in the --cluster file")
    cluster = load_cluster(options.cluster or Path("slurm"))
    script = (launch.run_dir / SCRIPT).resolve()
    listed = tuple(Host(f"node-{index}", cluster.ranks_per_node) for index in range(cluster.nodes))
    hosts, spares = divide(launch, listed, "the cluster file", "asks for only {}")
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
    # sbatch hands every SLURM_* on, whatever --export says: within another job this one would take itself for that.
    code = subprocess.run(command.argv, env=environment.of_ranks(), check=False).returncode
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
    # The tasks of an array are runs of their own, each in a folder below run.dir.
    if cluster.array_key is not None:
        if "--resume" in launch.arguments:
            raise ConfigError("array_key begins runs of their own: resume one of them with a cluster file without it")
        if as_override("run.dir", str(run_dir)) != f"run.dir={run_dir}":
            raise ConfigError(f"run.dir {run_dir}: array_key adds to it; take a path that needs no quotes in YAML")
        folder += f"/{ARRAY_NUMBER}"
        arguments += f" {cluster.array_key}={ARRAY_NUMBER} {shlex.quote(f'run.dir={run_dir}')}/{ARRAY_NUMBER}"
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
        after=_REQUEUE.format(after=after, restarts=cluster.restarts, own_id=OWN_ID) if requeue else after,
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
        # A job that is queued again keeps its number, and so its log.
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
