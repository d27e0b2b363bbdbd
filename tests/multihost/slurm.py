"""A Slurm cluster of two nodes on one machine: a controller, two slurmds and munge, all in a temporary folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NODES = ("n1", "n2")
_CONF = """\
ClusterName=capt
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillWait=30
JobRequeue=1
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Missing requirements, or the empty string."""
    if os.geteuid() != 0:
        return "needs root"
    tools = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
    absent = sorted({package for tool, package in tools.items() if _which(tool) is None})
    return f"needs the packages {', '.join(absent)}" if absent else ""


@dataclass(frozen=True)
class Cluster:
    """A running cluster: its folder, and the variables with which Slurm's commands find it."""

    folder: Path
    env: dict[str, str]

    def run(self, *argv: str) -> str:
        """Output of a command of Slurm."""
        done = subprocess.run(argv, env={**os.environ, **self.env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def state(self, job: int | str) -> str:
        """The state of a job, or of a task of an array (``7_2``), such as RUNNING."""
        shown = self.run("scontrol", "show", "job", str(job), "--oneliner")
        return shown.partition("JobState=")[2].split()[0]

    def begins_again(self, job: int) -> bool:
        """Return whether a job that was queued again runs; Slurm lets it wait for two minutes, this does not."""
        if self.state(job) == "PENDING":
            with suppress(AssertionError):  # it has begun just now
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        return self.state(job) == "RUNNING"

    def requeued(self, job: int | str) -> int:
        """Times that a job, or a task of an array, was queued again."""
        shown = self.run("scontrol", "show", "job", str(job), "--oneliner")
        return int(shown.partition("Restarts=")[2].split()[0])

    def lose(self, node: str, process: int) -> None:
        """Kill the daemon of a node and all that Slurm has there above a process of a job, as if the node were gone."""
        os.kill(int((self.folder / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
        for pid in [process, *_parents(process)]:
            os.kill(pid, signal.SIGKILL)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Start the cluster, and end it with all of its jobs."""
    folder.mkdir()
    with ExitStack() as undo:
        ports = _free_ports(3)
        conf = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        conf.write_text(_CONF.format(host=host, folder=folder, ports=ports))
        for number in range(2):  # to Slurm a GPU is a file
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        env = {"SLURM_CONF": str(conf)}
        options = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        options |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        _start([_tool("munged"), "--force", *(f"--{name}={folder / file}" for name, file in options.items())], env)
        undo.callback(_end, folder / "munged.pid")
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        _start([_tool("slurmctld")], env)
        undo.callback(_end, folder / "slurmctld.pid")
        for node in NODES:
            _start([_tool("slurmd"), "-N", node], env)
            undo.callback(_end, folder / f"slurmd-{node}.pid")
        cluster = Cluster(folder, env)
        undo.callback(_cancel_all, cluster)
        _wait_until_idle(cluster)
        yield cluster


def _cancel_all(cluster: Cluster) -> None:
    with suppress(AssertionError):
        cluster.run("scancel", "--state=PENDING,RUNNING,SUSPENDED", f"--user={os.environ.get('USER', 'root')}")


def _wait_until_idle(cluster: Cluster) -> None:
    until = time.monotonic() + 20
    while cluster.run("sinfo", "-h", "-o", "%D %T").split() != ["2", "idle"]:
        assert time.monotonic() < until, cluster.run("sinfo")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(argv: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"


def _end(pid_file: Path) -> None:
    with suppress(OSError, ValueError):
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


def _parents(pid: int) -> list[int]:
    """The processes above one, as far up as Slurm's manager of its step."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent > 1, "no process of a job step"
    name = Path(f"/proc/{parent}/cmdline").read_text()
    return [parent] if name.startswith("slurmstepd") else [parent, *_parents(parent)]


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _tool(name: str) -> str:
    found = _which(name)
    assert found is not None, name
    return found
