"""Several hosts over ssh.

Nothing but ssh and this Python is needed on a host. The job's environment goes through ssh's stdin.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from capt.launcher import environment
from capt.launcher.backends import hosts as on_hosts
from capt.launcher.plan import DEFAULT_PORT, End, Launch, Plan
from capt.launcher.ssh import Host, ssh_command
from capt.launcher.supervisor.link import Link
from capt.launcher.supervisor.node import PROGRAM
from capt.launcher.supervisor.output import Output

SPARES = True
"""Hosts beyond ``--nodes`` are spares."""


def plan(launch: Launch) -> Plan:
    """Plan one command a rank; hosts of the hostfile beyond ``--nodes`` are spares.

    Raises:
        ConfigError: the hostfile is missing, wrong or too short; ``--nproc`` is given (the slots say it); there is no
            spare host where one would be needed; a forwarded variable is not plain.
    """
    options = launch.options
    listed = options.hosts_of_slots("ssh")
    hosts, spares = on_hosts.divide(launch, listed, str(options.hostfile), "names only {} hosts")
    return Plan(
        "ssh",
        hosts,
        on_hosts.commands(launch, hosts, options.master_addr or hosts[0].name, options.master_port or DEFAULT_PORT),
        files=launch.files,
        forwarded_env=environment.forwarded_to_hosts(environment.inherited(), (Path.home(), Path())),
        master_port=options.master_port or DEFAULT_PORT,
        spares=spares,
        examined="ssh",
        blocked_reason="" if shutil.which("ssh") else "ssh is not installed (Debian and Ubuntu: openssh-client)",
    )


def start(launch: Launch, plan: Plan) -> End:
    """Run the job on the hosts that can be reached; SIGTERM, SIGUSR1 and Ctrl-C reach every rank."""
    inherited = environment.inherited()
    path = [entry for entry in plan.forwarded_env.get("PYTHONPATH", "").split(":") if entry]

    def connect(host: Host, output: Output) -> Link:
        return Link.through(host.name, ssh_command(host.name, inherited, PROGRAM), inherited, path, output)

    # what a login shell has set for Python must not be the job's
    return on_hosts.run(launch, plan, connect, {"PYTHONPATH": "", **plan.forwarded_env})
