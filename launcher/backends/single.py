"""Run one foreign launcher (``deepspeed``, ``torchrun``) in the foreground and find out how its job really ended."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from launcher.plan import Command, End
from launcher.supervisor import processes
from launcher.watch import StatusWatch
from pretrain.engine.run_folder import FAILED

log = logging.getLogger(__name__)

_POLL, _AGAIN = 0.2, 1.0


def run_launcher(
    command: Command,
    env: Mapping[str, str],
    run_dir: Path,
    *,
    signal_ranks: Callable[[signal.Signals], bool] | None = None,
) -> End:
    """Start ``command``, pass signals on, wait for it, and return how the job ended (see ``StatusWatch``).

    Args:
        command: the launcher and its arguments.
        env: the environment it inherits.
        run_dir: the run folder, where the job says how it ended.
        signal_ranks: sends a signal to every rank, wherever it runs, and tells whether each host had one to send it to;
            without it the launcher passes signals on itself.
    """
    watch = StatusWatch.begin(run_dir)
    # SIGTERM, not SIGKILL: these launchers take their ranks down with them only if they may run a handler.
    child = processes.start(command.argv, {**env, **command.env}, on_parent_death=signal.SIGTERM)
    waiting: signal.Signals | None = None

    def stop(number: signal.Signals) -> None:
        nonlocal waiting
        if signal_ranks:
            waiting = number
        else:
            processes.send(child, number)
            for pid in processes.descendants(child.pid):  # a rank that is stopped cannot hear the signal
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def kill() -> None:
        if signal_ranks:
            signal_ranks(signal.SIGKILL)
        processes.kill_tree(child)

    with processes.stop_signals(stop, kill):
        while not processes.ended(child):
            if signal_ranks and waiting:
                delivered = signal_ranks(waiting)
                if delivered and watch.state() == "running":  # else a rank may still be about to start: again
                    waiting = None
            time.sleep(_AGAIN if waiting else _POLL)
        code = int(child.returncode)
        if code < 0 and signal_ranks:  # the launcher itself was killed: its ranks would run on unseen
            signal_ranks(signal.SIGKILL)
    result, name = watch.exit_code(code), Path(command.argv[0]).name
    if code == 0 and result == FAILED:
        log.error("%s ended with 0, but the job did not end (state: %s)", name, watch.state())
    return End(result, f"{name} ended with {code} before the job said how it ended")
