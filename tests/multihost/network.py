"""Several hosts on one machine: network namespaces joined by a bridge, an sshd in each, keys of their own.

Each host has a folder for temporary files and a ``/dev/shm`` of its own, so that what is left there can be seen.

Nothing outside a temporary folder and the namespaces is touched: ssh reads a configuration of its own, through a
wrapper that is first on ``PATH``, as a user's working ``~/.ssh/config`` would.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multihost.warm import command, warm_server

INTERFACE = "eth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Addresses of the two hosts of most tests; a third one is ``SPARE``."""
SPARE = "10.77.0.3"


def missing() -> str:
    """Missing requirements, or the empty string."""
    if os.geteuid() != 0:
        return "needs root"
    tools = {
        "sshd": "openssh-server",
        "ssh": "openssh-client",
        "ssh-keygen": "openssh-client",
        "ip": "iproute2",
        "pdsh": "pdsh",
    }
    absent = sorted({package for tool, package in tools.items() if _which(tool) is None})
    if absent:
        return f"needs the packages {', '.join(absent)}"
    probe = f"capt-probe-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"needs network namespaces ({made.stderr.strip()})"
    _run("ip", "netns", "del", probe)
    return ""


@dataclass(frozen=True)
class Hosts:
    """Hosts that reach each other over ssh; ``names`` are their namespaces."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    folder: Path

    def hostfile(self, slots: int = 1) -> Path:
        """A hostfile that lists all."""
        path = self.folder / "hosts"
        path.write_text("".join(f"{address} slots={slots}\n" for address in self.addresses))
        return path

    def environment(self, **extra: str) -> dict[str, str]:
        """The environment of a user on the first host."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # what torch has compiled already
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(home), "XDG_CACHE_HOME": cache, **extra}

    def popen(self, argv: list[str], *, cwd: Path, log: Path, **extra: str) -> subprocess.Popen[bytes]:
        """Start a command on the first host."""
        with log.open("wb") as f:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[0], *argv],
                cwd=cwd,
                env=self.environment(**extra),
                stdin=subprocess.DEVNULL,
                stdout=f,
                stderr=subprocess.STDOUT,
            )

    def pids(self, host: int) -> list[int]:
        """Processes on a host, without its sshd."""
        listed = _run("ip", "netns", "pids", self.names[host]).split()
        return [int(pid) for pid in listed if not _command(int(pid)).startswith("sshd") and _command(int(pid))]

    def node(self, host: int) -> int:
        """The supervisor of a warm host: the process whose parent is neither on it nor this process."""
        others = {os.getpid(), *map(int, _run("ip", "netns", "pids", self.names[host]).split())}
        (node,) = [pid for pid in self.pids(host) if _parent(pid) not in others]
        return node

    def rank(self, host: int) -> int:
        """The process of a warm host's only rank: the child of the supervisor there."""
        node = self.node(host)
        (rank,) = [pid for pid in self.pids(host) if _parent(pid) == node]
        return rank

    def link(self, host: int, state: str) -> None:
        """Plug a host's cable in (``up``) or out (``down``)."""
        _run("ip", "-n", self.names[host], "link", "set", INTERFACE, state)

    def cut(self, host: int, other: int) -> None:
        """Let a host send nothing to another one any more, for good; both still hear the rest."""
        _run("ip", "-n", self.names[host], "route", "add", "blackhole", f"{self.addresses[other]}/32")

    def left(self) -> dict[str, list[str]]:
        """Content of the hosts' shared memory and temporary folders, and their processes."""
        found = {
            f"{self.addresses[host]} processes": list(map(str, self.pids(host))) for host in range(len(self.names))
        }
        for name, address in zip(self.names, self.addresses, strict=True):
            daemon = next(pid for pid in _run("ip", "netns", "pids", name).split() if _command(int(pid)) == "sshd")
            found[f"{address} shared memory"] = os.listdir(f"/proc/{daemon}/root/dev/shm")
            found[f"{address} temporary files"] = os.listdir(_temporary(self.folder, address))
        return {where: what for where, what in found.items() if what}


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make two hosts, and take all of it away again, whatever runs in them."""
    with several_hosts(folder, ADDRESSES) as hosts:
        yield hosts


@contextmanager
def several_hosts(folder: Path, addresses: tuple[str, ...], *, warm: bool = False) -> Iterator[Hosts]:
    """Make hosts of these addresses, and take all of it away again, whatever runs in them.

    Of ``warm`` ones each Python that ssh would start is forked (:mod:`tests.multihost.warm`). The test is skipped where
    this machine lacks something.
    """
    if reason := missing():
        pytest.skip(reason)
    tag = uuid.uuid4().hex[:6]
    names = tuple(f"capt-{tag}-{letter}" for letter, _ in zip("abc", addresses, strict=False))
    bridge = f"br-{tag}"
    with ExitStack() as undo:
        server = undo.enter_context(warm_server(folder / "warm")) if warm else None
        _run("ip", "link", "add", bridge, "type", "bridge")
        undo.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            _run("ip", "netns", "add", name)
            undo.callback(_remove_namespace, name)
            outer = f"v{index}-{tag}"
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run("ip", "-n", name, "link", "set", device, "up")
        _start_sshds(names, addresses, folder, f"ForceCommand {command(server)}\n" if server else "")
        yield Hosts(names, addresses, folder)


def _start_sshds(names: tuple[str, ...], addresses: tuple[str, ...], folder: Path, settings: str) -> None:
    keys = folder / "ssh"
    keys.mkdir(mode=0o700)
    for key in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / key))
    host_key = (keys / "host.pub").read_text()
    (keys / "known_hosts").write_text("".join(f"{address} {host_key}" for address in addresses))
    (keys / "config").write_text(
        f"IdentityFile {keys}/user\nIdentitiesOnly yes\nUserKnownHostsFile {keys}/known_hosts\n"
        "GlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\nLogLevel ERROR\n"
    )
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {_which("ssh")} -F {keys}/config "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name, address in zip(names, addresses, strict=True):
        _temporary(folder, address).mkdir()
        config = keys / f"sshd-{address}"
        config.write_text(
            f"ListenAddress {address}\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/user.pub\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\n"
            f"SetEnv TMPDIR={_temporary(folder, address)} TORCHINDUCTOR_CACHE_DIR={folder}/compiled\n{settings}"
        )
        daemon = f"{_which('sshd')} -f {config} -E {keys}/log-{address}"
        own = f"mount -t tmpfs -o size=1g own /dev/shm && exec {daemon}"  # ip gives it mounts of its own
        _run("ip", "netns", "exec", name, "sh", "-c", own)
        _wait_for_port(name, address)


def _temporary(folder: Path, address: str) -> Path:
    return folder / f"tmp-{address}"


def _wait_for_port(name: str, address: str) -> None:
    probe = f"import socket; socket.create_connection(({address!r}, 22), 1).close()"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        command = ["ip", "netns", "exec", name, "python3", "-S", "-c", probe]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(f"sshd on {address} does not answer")


def _remove_namespace(name: str) -> None:
    for _ in range(50):
        pids = _run("ip", "netns", "pids", name).split()
        if not pids:
            break
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    _run("ip", "netns", "del", name)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
