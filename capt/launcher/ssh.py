"""Calls from this host to others: the hostfile, checked names, the options of every ssh, and the program at its end."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from capt.pretrain.base.errors import ConfigError, MachineError
from capt.pretrain.base.files import read_bytes
from capt.pretrain.base.process import allow_open_files

# Names and numbers that reach a remote shell or a rendezvous: one validator for each, wherever they come from.
#
# Options, ``launch.json``, hostfiles and cluster files give hosts, ports and numbers of processes; multi-host
# launchers put them into command lines that a shell reads on every host. What is not plainly one of these is refused.


MAX_SLOTS = 512
"""Processes that one host may run."""

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9_])?")


def check_host(name: str) -> str:
    """``name``, if it is a host name or an IPv4 address; else ``ValueError``."""
    if not _HOST.fullmatch(name):
        raise ValueError(
            "not a host: a name of letters, digits, '.', '-' and '_' that does not begin with '-', "
            "or an IP address without a zone"
        )
    return name


def check_address(name: str) -> str:
    """``name``, if it is a host (``check_host``) or an IPv6 address without a zone; else ``ValueError``."""
    if ":" in name and re.fullmatch(r"[0-9A-Fa-f:.]{2,45}", name):
        try:
            return str(IPv6Address(name))
        except ValueError:
            pass
    return check_host(name)


Address = Annotated[str, AfterValidator(check_address)]
Port = Annotated[int, Field(ge=1, le=65535)]
Slots = Annotated[int, Field(ge=1, le=MAX_SLOTS)]


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


# The hostfile: one ``host slots=N`` a line, ``#`` begins a comment. Strict, because its words reach a remote shell.
#
# DeepSpeed runs on this host alone when the file is missing, takes trailing junk for a comment and lets any word be a
# host, ``-oProxyCommand=...`` included. Here each of these is an error that names the file and the line.


_MAX_BYTES = 1_000_000
_LINE = re.compile(r"(?P<host>\S+)[ \t]+slots=(?P<slots>-?[0-9]{1,12})")
_PART = re.compile(
    r"(\[(?P<address>[^\]@]+)\]|(?P<bare>[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)|(?P<name>[^:@\[\]]+))"
    r"(:(?P<slots>[0-9]{1,4}(,[0-9]{1,4})*))?"
)
"""A host of ``--include`` and ``--exclude``, with slots or without."""


@dataclass(frozen=True)
class Host:
    """A host and the number of processes (one an accelerator) that it runs."""

    name: str
    slots: int
    devices: tuple[int, ...] = ()
    """The accelerators that its processes take; empty: the first ones."""

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which its processes take those accelerators."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices))} if self.devices else {}


def read_hostfile(path: Path, include: str | None = None, exclude: str | None = None) -> tuple[Host, ...]:
    """Parse a hostfile, and take the hosts that ``--include`` names or leave those out that ``--exclude`` does.

    Raises:
        ConfigError: the file is missing, empty, not text or too large; a line is not ``host slots=N``; a host occurs
            twice, is not a plain name or an IP address, or has no or an absurd number of slots; ``include`` or
            ``exclude`` is malformed, names what the file does not, or leaves nothing.
    """
    hosts: dict[str, tuple[Host, int]] = {}
    for number, raw in enumerate(_text(path).split("\n"), start=1):
        line = raw.split("#", 1)[0].strip(" \t\r")
        if not line:
            continue
        host = _parse(line, f"{path}, line {number}")
        key = _key(host.name)
        if key in hosts:
            raise ConfigError(f"{path}, line {number}: host {host.name!r} is already on line {hosts[key][1]}")
        hosts[key] = host, number
    if not hosts:
        raise ConfigError(f"hostfile {path} names no host; write a line such as 'node-1 slots=8' for each")
    return _filtered({key: host for key, (host, _) in hosts.items()}, path, include, exclude)


def _filtered(
    hosts: dict[str, Host], path: Path, include: str | None, exclude: str | None
) -> tuple[Host, ...]:  # as DeepSpeed's parse_resource_filter, which also keeps the order of the file
    if include is not None and exclude is not None:
        raise ConfigError("--include and --exclude do not go together: the first says all that is taken")
    if include is not None:
        wanted = _parts(include, "--include", hosts, path)
        chosen = {key: _with(hosts[key], slots) if slots else hosts[key] for key, slots in wanted.items()}
    elif exclude is not None:
        chosen = dict(hosts)
        for key, slots in _parts(exclude, "--exclude", hosts, path).items():
            left = sorted(set(range(hosts[key].slots)) - slots) if slots else []
            if left:
                chosen[key] = _with(hosts[key], set(left))
            else:
                del chosen[key]
    else:
        return tuple(hosts.values())
    if not chosen:
        raise ConfigError(f"--exclude {exclude} leaves no host of {path}")
    return tuple(chosen[key] for key in hosts if key in chosen)


def _with(host: Host, slots: set[int]) -> Host:
    return Host(host.name, len(slots), tuple(sorted(slots)))


def _parts(text: str, option: str, hosts: dict[str, Host], path: Path) -> dict[str, set[int]]:
    """The slots of each host that a filter names; an empty set for a whole host."""
    found: dict[str, set[int]] = {}
    for part in text.split("@"):
        match = _PART.fullmatch(part)
        if match is None:
            form = "HOST[:SLOT,...][@HOST[:SLOT,...]...], an IPv6 address in brackets"
            raise ConfigError(f"{option}: {part[:80]!r} is not of the form {form}")
        key = _key(match["address"] or match["bare"] or match["name"])
        if key not in hosts:
            raise ConfigError(f"{option}: {path} names no host {part[:80]!r}")
        slots = {int(slot) for slot in (match["slots"] or "").split(",") if slot}
        if beyond := [slot for slot in sorted(slots) if slot >= hosts[key].slots]:
            last = hosts[key].slots - 1
            raise ConfigError(f"{option}: {hosts[key].name} has the slots 0 to {last} in {path}, and not {beyond[0]}")
        # Further parts may add slots to a host, but not to a whole one.
        if key in found and not (slots and found[key]):
            raise ConfigError(f"{option}: {hosts[key].name} occurs twice")
        found[key] = found.get(key, set()) | slots
    return found


def _key(name: str) -> str:
    """The one form of a host's name, by which hosts are compared."""
    try:
        return check_address(name).lower()
    except ValueError:
        return name.lower()


def is_this_host(name: str) -> bool:
    """True when ``name`` is a name of the machine we run on."""
    own = socket.gethostname()
    return name.lower() in {"localhost", "127.0.0.1", "::1", own.lower(), own.split(".")[0].lower()}


def _text(path: Path) -> str:
    if not path.exists():
        raise MachineError(f"no hostfile {path}; without --hostfile the job runs on this host only")
    try:
        return read_bytes(path, limit=_MAX_BYTES, error=ConfigError).decode("ascii")
    except UnicodeDecodeError as error:
        raise ConfigError(f"hostfile {path}: not plain ASCII text (byte {error.start})") from None


def _parse(line: str, where: str) -> Host:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ConfigError(f"{where}: {line[:80]!r} is not of the form 'host slots=N'")
    name, slots = match["host"], int(match["slots"])
    try:
        name = check_address(name[1:-1] if name.startswith("[") and name.endswith("]") and ":" in name else name)
    except ValueError as error:
        hint = "user, port and the like belong in ~/.ssh/config"
        raise ConfigError(f"{where}: {name[:80]!r} is {error} ({hint})") from None
    if not 0 < slots <= MAX_SLOTS:
        raise ConfigError(f"{where}: slots={slots}; a host runs 1 to {MAX_SLOTS} processes")
    return Host(name, slots)
