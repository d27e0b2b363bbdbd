"""How this host calls the others: the options of every ssh, of pdsh's and of our own, and the program at its end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from pretrain.base.open_files import allow_open_files

USERS_OPTIONS = "PDSH_SSH_ARGS_APPEND"
"""The variable with which a user gives pdsh, and so every launch, further options of ssh."""
# A host that asks a question, does not answer or disappears is an error within seconds instead of an endless wait.
_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"


_FILES = 4
"""Files that this process has open for each host: pipes to ssh and from it, and what waits for them."""


def allow_hosts(hosts: int) -> None:
    """Raise this process's limit of open files to what a number of hosts needs, as far as the system lets it."""
    allow_open_files(_FILES * hosts)


def ssh_options(environment: Mapping[str, str]) -> str:
    """The options of ssh, in one line; of two for the same thing ssh takes the first, so the user's win."""
    return f"{environment.get(USERS_OPTIONS, '')} {_OPTIONS}".strip()


def ssh_command(host: str, environment: Mapping[str, str], program: bytes) -> list[str]:
    """ssh to a host, and there this Python at the same path, which reads ``program`` from stdin.

    What ``program`` needs to know follows it on stdin: nothing of it is in a command line. The connection is its
    own (``ControlPath=none``): one that is shared with others of the user would end, or last, as theirs does.
    """
    options = ["-a", "-x", "-T", "-o", "ControlPath=none", *shlex.split(ssh_options(environment))]
    return ["ssh", *options, host, remote_command(program)]


def remote_command(program: bytes) -> str:
    """The command line for a remote shell.

    Nothing of the working folder or of ``PYTHON*`` variables is imported, and what follows the program on stdin is
    left to it.
    """
    return shlex.join(python_reading(program))


def python_reading(program: bytes) -> list[str]:
    """This Python, executing the program that it is given on stdin."""
    start = f"import sys;sys.path=[p for p in sys.path if p];exec(sys.stdin.buffer.read({len(program)}))"
    return [sys.executable, "-E", "-u", "-c", start]
