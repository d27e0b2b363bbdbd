"""Commands of ssh on the hosts of :mod:`tests.multihost.network`, forked from the fork server of `tests.support`.

A Python at the end of an ssh would import nothing but ``capt.launcher.supervisor``; each rank below it would import
torch for seconds. So sshd runs this file in its place (``ForceCommand``): it hands its descriptors, environment and
command to a server, which forks a process into the namespaces of the host, and ends as that ends. That process is the
Python of the command, and forks its ranks as :mod:`tests.forked` does. All else is as it was: the line is the one of
sshd, and whatever is killed is a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LONGEST = 1 << 16


def command(server: Path) -> str:
    """Command of sshd for everybody: this file."""
    return shlex.join([sys.executable, "-E", "-S", __file__, str(server)])


@contextmanager
def warm_server(path: Path) -> Iterator[Path]:
    """Serve at a socket of this name."""
    from tests.support import start_forked

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(64)
        server = start_forked(_serve, listening)
        try:
            yield path
        finally:
            server.kill()
            server.join()


def _serve(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        if os.fork() == 0:
            listening.close()
            try:
                _keep(connection)
            finally:
                os._exit(1)
        connection.close()


def _keep(connection: socket.socket) -> None:
    """Fork the process that was asked for, and tell how it ends."""
    asked, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 3)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    place = [os.open(f"/proc/{struct.unpack('3i', credentials)[0]}/ns/{kind}", os.O_RDONLY) for kind in ("net", "mnt")]
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(json.loads(asked), descriptors, place)
    for number in (*descriptors, *place):
        os.close(number)
    _, status = os.waitpid(pid, 0)
    connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(asked: dict[str, Any], descriptors: list[int], place: list[int]) -> None:
    """Be the Python of the command, in the namespaces of its host."""
    from tests.forked import fork_ranks, take_over

    for namespace in place:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    take_over(asked["env"], Path(asked["folder"]), (), dict(enumerate(descriptors)))
    fork_ranks()
    exec(asked["program"], {"__name__": "__main__"})
    os._exit(0)


def _ask(server: str) -> int:
    """Have the command of ssh carried out; its exit code."""
    words = shlex.split(os.environ.pop("SSH_ORIGINAL_COMMAND", ""))
    if words[1:4] != ["-E", "-u", "-c"]:
        os.execvp("sh", ["sh", "-c", shlex.join(words)])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        asked = {"program": words[4], "env": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
        for number in (0, 1, 2):
            os.close(number)
        (code,) = struct.unpack("i", connection.recv(4))
    if code < 0:
        os.kill(os.getpid(), -code)
    return int(code)


if __name__ == "__main__":
    os._exit(_ask(sys.argv[1]))
