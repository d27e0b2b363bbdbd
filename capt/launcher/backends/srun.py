"""The nodes of a Slurm allocation, reached by ``srun``: inside a batch job, or after ``salloc``.

A job step of one task on each node is its supervisor, so that a rank that dies or hangs costs a restart and not the
allocation. Slurm signals every step: the supervisors pass SIGTERM and SIGUSR1 on.
"""

from __future__ import annotations

import shutil

from capt.launcher.allocation import Allocation
from capt.launcher.backends import hosts as on_hosts
from capt.launcher.backends.slurm import SlurmCluster, load_cluster
from capt.launcher.plan import End, Launch, Plan
from capt.launcher.ssh import Host, python_reading
from capt.launcher.supervisor.link import ANSWER, Link
from capt.launcher.supervisor.node import PROGRAM
from capt.launcher.supervisor.output import Output

_FIRST_PORT, _PORTS = 20000, 10000
_UNPACKING = 600.0
"""Seconds for a node to answer out of a container: pyxis unpacks an image of gigabytes for each job step."""

SPARES = True
"""Hosts beyond ``--nodes`` are spares."""


def plan(launch: Launch) -> Plan:
    """Plan one command a rank: the tasks of the allocation, else the GPUs of a node, else one (`Allocation.hosts`).

    Nodes beyond ``--nodes`` are spares. Outside an allocation the plan is blocked.

    Raises:
        ConfigError: ``--hostfile`` or ``--nproc`` is given, the allocation is too small, or there is no spare node
            where one would be needed.
    """
    options, allocation = launch.options, Allocation.here()
    options.refuse("srun", "hostfile", "nproc", because="the allocation says where how many ranks run")
    blocked = "" if shutil.which("srun") else "there is no srun here"
    if not allocation.job:
        blocked = "this is no Slurm allocation; run it after salloc, or use --launcher slurm"
    listed = allocation.hosts() if not blocked else (Host("node-1", 1),)
    hosts, spares = on_hosts.divide(launch, listed, "the allocation", "has only {} nodes", known=not blocked)
    # By the number of the job: two allocations that share a node need different ports.
    port = options.master_port or _FIRST_PORT + int(allocation.job or 0) % _PORTS
    commands = on_hosts.commands(launch, hosts, options.master_addr or hosts[0].name, port, _cluster(launch).python)
    return Plan("srun", hosts, commands, files=launch.files, master_port=port, spares=spares, blocked_reason=blocked)


def start(launch: Launch, plan: Plan) -> End:
    """Run the job on the nodes that can be reached; Slurm's signals and those of this process reach every rank."""
    allocation, cluster = Allocation.here(), _cluster(launch)
    inherited = allocation.step_environment()
    path = [entry for entry in inherited.get("PYTHONPATH", "").split(":") if entry]
    contained = bool(cluster.container) or any(word.startswith("--container") for word in cluster.srun)
    # A container may have to be unpacked before anything in it can answer.
    answer = _UNPACKING if contained else ANSWER

    def connect(host: Host, output: Output) -> Link:
        command = srun_command(host, allocation, cluster)
        return Link.through(host.name, command, inherited, path, output, signalled=True, answer=answer)

    return on_hosts.run(launch, plan, connect, {}, cluster.python)


def _cluster(launch: Launch) -> SlurmCluster:
    """Read what the cluster file says of containers; nothing without one."""
    return load_cluster(launch.options.cluster) if launch.options.cluster else SlurmCluster()


def srun_command(host: Host, allocation: Allocation, cluster: SlurmCluster) -> list[str]:
    """A job step of one task on a node, with all that the job has there, and in its container."""
    supervisor = python_reading(PROGRAM)
    return [
        *("srun", "--export=ALL", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}"),
        *("--mem=0", "--cpu-bind=none", "--unbuffered", "--quiet"),
        *allocation.step_options(host.slots),
        *cluster.srun,
        *cluster.container,
        cluster.python or supervisor[0],
        *supervisor[1:],
    ]
