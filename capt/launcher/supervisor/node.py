"""The supervisor of one node: starts the ranks of its host, tells the head of them, and ends them when it is alone.

It runs at the end of an ssh or srun. The ranks are its children and die with it; it kills them when the head says so,
when that ends, and when the head has not been heard for the time of its lease
(:mod:`capt.launcher.supervisor.messages`). What ranks print goes to stderr, and so to the head. Slurm sends its stop
signals to this process, which passes them on and tells the head.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import Any

from capt.launcher.supervisor import processes
from capt.launcher.supervisor.messages import LEASE, MARK, REPORT
from capt.launcher.supervisor.ranks import LocalRanks
from capt.pretrain.base.process import boot_id, born, without_launchers

_POLL = 0.05
_ENDING = 5.0
_LONG = 1.0
"""Seconds in a section from which on it may be the file system that a rank waits for."""
_LAST_WORDS = 1.0
_CALL = 4.0
"""Seconds for a connection to the first host: less than a lease."""
_GPUS = 4.0
"""Seconds for nvidia-smi: the same."""
_PROGRAM = """\
import json, os, sys
order = json.loads(sys.stdin.buffer.readline())
os.chdir(order["folder"])
sys.path[:0] = order["path"]
from capt.launcher.supervisor.node import serve
os._exit(serve(order["signalled"]))
"""
PROGRAM = _PROGRAM.encode()
"""Read from stdin by the Python that ssh or srun starts; then a line with the working folder and the path of modules
follows, and nothing more until the node has said that it is up."""


def serve(signalled: bool) -> int:
    """Do what the head says until it says no more; the exit code is 0 when no rank is left.

    ``signalled``: SIGTERM and SIGUSR1 sent to this process ask the whole job to stop.
    """
    inward, outward, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # no rank reads what the head says
    os.dup2(2, 1)
    os.close(nothing)
    supervisor = Supervisor(inward, outward, signalled=signalled)
    if signalled:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: supervisor.stop(signal.Signals(number)))
    return supervisor.run()


class Supervisor:
    """The ranks of this host, and the line to the head."""

    def __init__(self, inward: int, outward: int, *, signalled: bool = False) -> None:
        self._in, self._out, self._signalled = inward, outward, signalled
        os.set_blocking(outward, False)  # a cut line must not keep us from our own end
        self._heard, self._unsaid = b"", b"\n"  # what a login shell has printed may have no end
        self._lease = time.monotonic() + LEASE
        self._reported, self._known = 0.0, 0
        self._ranks = LocalRanks()
        self._born: list[int] = []
        self._asked = self._over = False
        self._stop = 0

    def run(self) -> int:
        """Serve until the end, and leave no rank behind."""
        problem = ""
        try:
            pid = os.getpid()
            self._say(up={"pid": pid, "born": born(pid) or 0, "started": boot_id()})
            while not self._over:
                self._hear()
                self._ranks.look(0.0)
                self._report()
                if time.monotonic() > self._lease:
                    raise OSError(f"nothing heard of the head for {LEASE:g} s")
        except OSError as error:
            problem = " ".join(str(error).split())
        finally:
            self._ranks.close()
        if problem:
            with suppress(OSError):
                self._say(problem=problem[:2000])
        self._flush(_LAST_WORDS)
        return 1 if problem else 0

    def stop(self, number: signal.Signals) -> None:
        """Signal the ranks, and tell the head that this was asked for here."""
        self._asked, self._stop = True, int(number)
        self._reported = 0.0
        self._ranks.send(number)

    def _hear(self) -> None:
        ready, _, _ = select.select([self._in], [self._out] if self._unsaid else [], [], _POLL)
        if self._unsaid:
            self._flush(0.0)
        if not ready:
            return
        try:
            data = os.read(self._in, 1 << 16)
        except BlockingIOError:
            return
        if not data:  # the connection has ended: so has the head, or it wants us to
            self._over = True
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            self._do(json.loads(line))

    def _do(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "beat":
                # A time of this host's own clock, which the head has only sent back: clocks need not agree.
                self._lease = max(self._lease, order["now"] + LEASE)
            case "start":
                self._start(**order["job"])
            case "signal":
                self._asked = True
                self._ranks.send(signal.Signals(order["number"]))
            case "kill":
                self._ranks.kill()
            case "stacks":
                text, suspended = self._ranks.stacks(order["rank"])
                self._say(stacks={"text": text, "suspended": suspended})
            case "gpus":
                self._say(gpus=_gpus())
            case "listen" | "call" as what:
                try:
                    port = self._ranks.listen(**order["where"]) if what == "listen" else _call(**order["where"])
                    self._say(met={"port": port})
                except OSError as error:
                    self._say(met={"problem": error.strerror or str(error) or type(error).__name__})

    def _start(
        self, argv: list[str], env: dict[str, str], each: list[dict[str, str]], left: list[tuple[int, int]]
    ) -> None:
        """Start a rank for each environment, once what is ``left`` of an earlier attempt here has ended."""
        if stuck := processes.end_recorded([(pid, born) for pid, born in left], _ENDING):
            raise OSError(f"processes of before do not end: {', '.join(map(str, stuck))}")
        inherited = without_launchers(os.environ, within_slurm=self._signalled)
        for own in each:
            self._ranks.start(argv, {**inherited, **env, **own})
            self._born.append(born(self._ranks.where(len(self._born))[1]) or 0)

    def _report(self) -> None:
        over = sum(code is not None for code in self._ranks.codes)
        # Sooner only where another rank has ended.
        if time.monotonic() - self._reported < REPORT and over == self._known:
            return
        self._reported, self._known = time.monotonic(), over
        ranks = [
            {
                "pid": self._ranks.where(rank)[1],
                "born": self._born[rank],
                "code": code,
                "pulse": self._ranks.pulse(rank),
                "suspended": self._ranks.is_suspended(rank),
                "waits": self._waits(rank),
            }
            for rank, code in enumerate(self._ranks.codes)
        ]
        self._say(ranks=ranks, idle=self._ranks.idle() if self._asked else 0.0, asked=self._stop)

    def _waits(self, rank: int) -> bool:
        """Return true where a rank waits for a file system; looked at only where its section takes long."""
        pulse = self._ranks.pulse(rank)
        return pulse is not None and pulse.seconds > _LONG and self._ranks.waits_for_files(rank)

    def _say(self, **news: Any) -> None:
        self._unsaid += f"{MARK}{json.dumps({'now': time.monotonic(), **news})}\n".encode()
        self._flush(0.0)

    def _flush(self, seconds: float) -> None:
        """Write as much as the line takes. Raises ``OSError`` where it has ended."""
        until = time.monotonic() + seconds
        while self._unsaid:
            with suppress(BlockingIOError):
                self._unsaid = self._unsaid[os.write(self._out, self._unsaid) :]
            if time.monotonic() >= until:
                return
            time.sleep(_POLL if self._unsaid else 0)


def _gpus() -> dict[str, Any]:
    """Count the GPUs that nvidia-smi lists, or say what is wrong (`GPUs`); nothing where it is slow."""
    if shutil.which("nvidia-smi") is None:
        return {"count": 0}
    asked = subprocess.Popen(
        ["nvidia-smi", "--list-gpus"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said = asked.communicate(timeout=_GPUS)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        asked.kill()  # and not waited for: in a driver that hangs it cannot end
        return {}
    if asked.returncode:
        return {"problem": " ".join(said.split())[:500] or f"exit code {asked.returncode}"}
    return {"count": sum(line.startswith("GPU ") for line in said.splitlines())}


def _call(address: str, port: int) -> int:
    """Connect to the rendezvous, as the ranks will. Raises ``OSError`` where that is not possible."""
    socket.create_connection((address, port), _CALL).close()
    return port
