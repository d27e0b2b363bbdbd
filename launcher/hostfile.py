"""The hostfile: one ``host slots=N`` a line, ``#`` begins a comment. Strict, because its words reach a remote shell.

DeepSpeed runs on this host alone when the file is missing, takes trailing junk for a comment and lets any word be a
host, ``-oProxyCommand=...`` included. Here each of these is an error that names the file and the line.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from launcher.address import MAX_SLOTS, check_address
from pretrain.base.errors import ConfigError
from pretrain.base.files import read_bytes

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
        """What its processes need in their environment to take those accelerators."""
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
        name = check_address(name[1:-1] if name.startswith("[") and name.endswith("]") and ":" in name else name)
    except ValueError as error:
        hint = "user, port and the like belong in ~/.ssh/config"
        raise ConfigError(f"{where}: {name[:80]!r} is {error} ({hint})") from None
    if not 0 < slots <= MAX_SLOTS:
        raise ConfigError(f"{where}: slots={slots}; a host runs 1 to {MAX_SLOTS} processes")
    return Host(name, slots)
