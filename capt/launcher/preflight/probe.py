"""The program that looks at one host. It is sent on stdin to the Python there and needs nothing but that Python.

It reads one request a line, ``{"ask": NAME, ...}``, and answers each with a line of ``MARK`` and JSON, so that what a
login shell prints is not an answer. It ends when stdin does, and then removes the files that it has written. Nothing
that it is told is in a command line. The head calls the same functions for itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Answer = dict[str, Any]
MARK = "capt-preflight "
PACKAGES = ("torch", "deepspeed", "capt-pretraining")
_OURS = ("capt",)
_SIOCGIFADDR = 0x8915
PATIENCE = 5.0
"""Seconds within which a file that another host has written must be seen, or a connection be answered."""

_written: list[str] = []
_servers: list[socket.socket] = []


def facts(pythonpath: Sequence[str] = (), folder: str = ".") -> Answer:
    """Versions, devices, networks and limits of this host; the keys are the fields of
    ``capt.launcher.preflight.facts``."""
    path = [*pythonpath, *(entry for entry in sys.path if entry)]
    cards, problem = gpus()
    kind, place = apex(path)
    total, free = shared_memory()
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name, path) for name in PACKAGES},
        "sources": sources(path),
        "folder": os.path.isdir(folder),
        "interfaces": interfaces(),
        "name": socket.gethostname(),
        "name_address": _own_address(),
        "gpus": cards,
        "gpu_problem": problem,
        "apex": kind,
        "apex_place": place,
        "shm_total": total,
        "shm_free": free,
        "descriptors": descriptors(),
    }


def _version(name: str, path: list[str]) -> str:
    found = next(iter(importlib.metadata.distributions(name=name, path=path)), None)
    return found.version if found else ""


def sources(path: Sequence[str]) -> str:
    """A digest of our packages as ``path`` finds them; empty where there are none."""
    digest, found = hashlib.sha256(), False
    for package in _OURS:
        root = next((os.path.join(entry, package) for entry in path if os.path.isdir(os.path.join(entry, package))), "")
        spec = None if root else importlib.util.find_spec(package)  # an editable installation
        for place in [root] if root else list(spec.submodule_search_locations or []) if spec else []:
            for folder, names, files in os.walk(place, followlinks=True):
                # In place: os.walk then takes the folders in the same order on every host.
                names.sort()
                for file in sorted(files):
                    if file.endswith((".py", ".yaml")):
                        found = True
                        full = os.path.join(folder, file)
                        with open(full, "rb") as f:
                            content = f.read()
                        digest.update(f"{package}/{os.path.relpath(full, place)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16] if found else ""


def gpus() -> tuple[list[list[str]], str]:
    """``[name, memory, driver]`` of each NVIDIA GPU, and what is wrong with the driver (empty if nothing)."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return [], "no answer in 30 s"
    if answer.returncode != 0:
        return [], " ".join((answer.stderr or answer.stdout).split()) or f"exit code {answer.returncode}"
    return [line.strip().split(", ") for line in answer.stdout.splitlines() if line.strip()], ""


def apex(path: Sequence[str]) -> tuple[str, str]:
    """Return the kind and place of apex on ``path``: ``absent``, ``unrelated``, ``plain`` (no kernels), ``compiled``.

    NVIDIA's has ``apex.optimizers`` and the compiled ``amp_C``; PyPI's project of that name is a Pyramid toolkit.
    """
    for entry in path:
        place = os.path.join(entry, "apex")
        if os.path.isdir(place) or os.path.isfile(place + ".py"):
            if not os.path.isdir(os.path.join(place, "optimizers")):
                return "unrelated", place
            compiled = any(name.startswith("amp_C.") for one in path if os.path.isdir(one) for name in os.listdir(one))
            return "compiled" if compiled else "plain", place
    return "absent", ""


def shared_memory() -> tuple[int, int]:
    """Bytes of ``/dev/shm``, all and free; -1 where there is none."""
    if not os.path.isdir("/dev/shm"):
        return -1, -1
    usage = shutil.disk_usage("/dev/shm")
    return usage.total, usage.free


def descriptors() -> int:
    """Files that a process may have open; -1 for no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def interfaces() -> dict[str, str]:
    """The network interfaces and their IPv4 addresses (empty for one without)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            found[name] = ""
            with contextlib.suppress(OSError):
                # struct ifreq: 16 bytes of name, then family, port and address.
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def write(path: str, text: str) -> Answer:
    """Write a file that nobody else has, and remember to remove it."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    _written.append(path)
    with os.fdopen(file, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    return {}


def sees(path: str, text: str, patience: float = PATIENCE) -> Answer:
    """Look for a file that holds ``text``, and wait for slow file servers."""
    until = time.monotonic() + patience
    while True:
        with contextlib.suppress(FileNotFoundError), open(path) as f:
            if f.read() == text:
                return {"found": True}
        if time.monotonic() > until:
            return {"found": False}
        with contextlib.suppress(FileNotFoundError):  # last, for the folder may hold a million files
            os.listdir(os.path.dirname(path))  # makes a file server's client look again
        time.sleep(0.05)


def listen(port: int, token: str) -> Answer:
    """Take the port and tell everyone who connects ``token``, as the rendezvous would answer. Raises ``OSError``."""
    server = server_on(port)
    _servers.append(server)
    threading.Thread(target=_greet, args=(server, token.encode()), daemon=True).start()
    return {}


def server_on(port: int) -> socket.socket:
    """A socket that listens on the port of all addresses, as the rendezvous will. Raises ``OSError``."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            # Any other error is taken for a host without IPv6.
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=1024)


def _greet(server: socket.socket, token: bytes) -> None:
    while True:
        try:
            caller, _ = server.accept()
        except OSError:  # closed
            return
        with contextlib.suppress(OSError), caller:
            caller.settimeout(PATIENCE)
            caller.sendall(token)
            caller.recv(1)  # the caller closes first, so that the port is free immediately


def connect(address: str, port: int) -> Answer:
    """Call the rendezvous: what it says, its address as seen from here, and the address and interface used for it."""
    with socket.create_connection((address, port), timeout=PATIENCE) as call:
        peer, own = call.getpeername()[0], call.getsockname()[0]
        said = call.recv(64).decode(errors="replace")
    name = next((name for name, one in interfaces().items() if one == own), "")
    return {"said": said, "peer": peer, "own": own, "interface": name}


def close() -> Answer:
    """Give the port back."""
    while _servers:
        server = _servers.pop()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        server.close()
    return {}


def remove() -> Answer:
    """Remove the files that were written."""
    while _written:
        with contextlib.suppress(OSError):
            os.unlink(_written.pop())
    return {}


def now() -> Answer:
    """This host's clock, in seconds since 1970."""
    return {"time": time.time()}


_ANSWERS: dict[str, Callable[..., Answer]] = {
    one.__name__: one for one in (facts, write, sees, listen, connect, close, remove, now)
}


def problem(error: Exception) -> str:
    """Describe an error, in the words of the operating system where it is one of its."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error) or type(error).__name__


def serve() -> None:
    """Answer requests until stdin ends."""
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = _ANSWERS[request.pop("ask")](**request)
            except (OSError, ValueError) as error:
                answer = {"error": problem(error)}
            sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")  # a login shell's last line may have no end
            sys.stdout.flush()
    finally:
        close()
        remove()


if __name__ == "__main__":
    serve()
