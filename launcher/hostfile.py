"""The hostfile: one ``host slots=N`` a line, ``#`` begins a comment. Strict, because its words reach a remote shell.

DeepSpeed runs on this host alone when the file is missing, takes trailing junk for a comment and lets any word be a
host, ``-oProxyCommand=...`` included. Here each of these is an error that names the file and the line.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from launcher.address import MAX_SLOTS, check_host
from pretrain.base.errors import ConfigError
from pretrain.base.files import read_bytes

_MAX_BYTES = 1_000_000
_LINE = re.compile(r"(?P<host>\S+)[ \t]+slots=(?P<slots>-?[0-9]{1,12})")


@dataclass(frozen=True)
class Host:
    """A host and the number of processes (one an accelerator) that it runs."""

    name: str
    slots: int


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Parse a hostfile.

    Raises:
        ConfigError: the file is missing, empty, not text or too large; a line is not ``host slots=N``; a host stands
            twice, is not a plain name or IPv4 address, or has no or an absurd number of slots.
    """
    hosts: dict[str, tuple[Host, int]] = {}
    for number, raw in enumerate(_text(path).split("\n"), start=1):
        line = raw.split("#", 1)[0].strip(" \t\r")
        if not line:
            continue
        host = _parse(line, f"{path}, line {number}")
        key = host.name.lower()
        if key in hosts:
            raise ConfigError(f"{path}, line {number}: host {host.name!r} already stands on line {hosts[key][1]}")
        hosts[key] = host, number
    if not hosts:
        raise ConfigError(f"hostfile {path} names no host; write a line such as 'node-1 slots=8' for each")
    return tuple(host for host, _ in hosts.values())


def is_this_host(name: str) -> bool:
    """True when ``name`` is a name of the machine we run on."""
    own = socket.gethostname()
    return name.lower() in {"localhost", "127.0.0.1", own.lower(), own.split(".")[0].lower()}


def _text(path: Path) -> str:
    if not path.exists():
        raise ConfigError(f"no hostfile {path}; without --hostfile the job runs on this host only")
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
        check_host(name)
    except ValueError as error:
        hint = "user, port and the like belong in ~/.ssh/config"
        raise ConfigError(f"{where}: {name[:80]!r} is {error} ({hint})") from None
    if not 0 < slots <= MAX_SLOTS:
        raise ConfigError(f"{where}: slots={slots}; a host runs 1 to {MAX_SLOTS} processes")
    return Host(name, slots)
