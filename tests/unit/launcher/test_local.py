"""The local backend with real processes (no torch in them, so that they start fast)."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capt.launcher.backends.local import End, run_ranks
from capt.launcher.plan import Command
from capt.launcher.supervisor import processes
from capt.launcher.supervisor.processes import stop_signals
from capt.launcher.supervisor.ranks import LocalRanks

PRELUDE = "import os, pathlib, signal, subprocess, sys, time; rank = int(os.environ['RANK']);"
SAVES = "signal.signal({signal}, lambda *_: os._exit(75)); pathlib.Path(f'ready-{{rank}}').touch(); time.sleep(60)"


def ranks(script: str, count: int = 2) -> tuple[Command, ...]:
    return tuple(Command((sys.executable, "-S", "-c", PRELUDE + script), {"RANK": str(r)}) for r in range(count))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition: object, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def launcher(tmp_path: Path):
    """Start ``run_ranks`` on a script in a process of its own, as ``capt`` does."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str, count: int = 2) -> subprocess.Popen[bytes]:
        driver = (  # a suite under nohup hands down that a hang-up is ignored, which run_ranks then leaves as it is
            "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
            "import sys; from capt.launcher.backends.local import run_ranks; from capt.launcher.plan import Command;"
            "end = run_ranks(tuple(Command((sys.executable, '-S', '-c', sys.argv[1]), {'RANK': str(r)})"
            " for r in range(int(sys.argv[2]))), patience=1); print(end.reason, file=sys.stderr); sys.exit(end.code)"
        )
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        process = subprocess.Popen([sys.executable, "-c", driver, PRELUDE + script, str(count)], cwd=tmp_path, env=env)
        started.append(process)
        assert wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == count), "the ranks did not start"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("code", [0, 75])
def test_a_common_end_is_the_jobs(count: int, code: int) -> None:
    # rank 0 ends first: a rank that is done must not have the others stopped
    assert run_ranks(ranks(f"time.sleep(.2 * rank); sys.exit({code})", count)).code == code


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (3, 1), (139, 1)])
def test_the_first_failing_rank_decides_and_the_others_are_stopped(tmp_path: Path, code: int, expected: int) -> None:
    script = (
        f"folder = pathlib.Path({str(tmp_path)!r}); (folder / f'{{rank}}.new').write_text(str(os.getpid()));"
        "(folder / f'{rank}.new').rename(folder / str(rank));"
        "all_run = lambda: len(list(folder.glob('[012]'))) == 3;"
        f"rank == 1 and any(all_run() or time.sleep(.02) for _ in range(1000)) and os._exit({code});"
        "time.sleep(60)"
    )
    assert run_ranks(ranks(script, 3)).code == expected
    pids = [tmp_path / str(rank) for rank in range(3)]
    assert time.time() - max(path.stat().st_mtime for path in pids) < 4
    assert all(is_gone(int(path.read_text())) for path in pids)


def test_a_rank_killed_by_a_signal_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    end = run_ranks(ranks("rank == 0 and os.kill(os.getpid(), 9); time.sleep(60)"))
    assert (end.code, end.reason) == (1, "rank 0 was killed by SIGKILL (out of memory?)")
    assert end.crash is not None
    assert (end.crash.rank, end.crash.signal, end.crash.cause) == (0, "SIGKILL", end.reason)
    assert "rank 0 was killed by SIGKILL" in caplog.text


def test_a_signal_without_a_name_kills_a_rank_like_any_other() -> None:
    end = run_ranks(ranks("rank == 0 and os.kill(os.getpid(), signal.SIGRTMIN + 1); time.sleep(60)"))
    assert end.crash is not None
    assert (end.code, end.crash.signal, end.crash.cause) == (1, "signal 35", "rank 0 was killed by signal 35")


def test_a_signal_that_came_before_the_ranks_were_started_reaches_them() -> None:
    begin = time.monotonic()
    with stop_signals(lambda _: None, lambda: None):
        signal.raise_signal(signal.SIGUSR1)
        end = run_ranks(ranks("time.sleep(60)"))
    assert (end.code, end.reason) == (75, "SIGUSR1 received before the first step")
    assert time.monotonic() - begin < 30


def test_a_signal_that_comes_while_a_rank_is_being_reaped_is_no_error() -> None:
    """Handlers run between the calls of ``Popen.wait``: the process is gone, and its exit code not noted yet."""
    rank = processes.start(["true"], {}, on_parent_death=signal.SIGKILL)
    os.waitpid(rank.pid, 0)
    processes.send(rank, signal.SIGTERM)
    processes.kill_tree(rank)
    rank.wait()


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    script = "signal.signal(15, signal.SIG_IGN); rank == 0 and (time.sleep(.3), os._exit(1)); time.sleep(60)"
    begin = time.monotonic()
    assert run_ranks(ranks(script), grace=0.5).code == 1
    assert time.monotonic() - begin < 5


def test_ranks_that_disagree_are_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    assert run_ranks(ranks("sys.exit(75 * (rank > 2))", 5)).code == 1
    assert "disagree on how the job ended: exit codes 0 of rank 0 to 2, 75 of rank 3, 4" in caplog.text


def test_what_a_rank_started_dies_with_it(tmp_path: Path) -> None:
    script = (
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']);"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))"
    )
    assert run_ranks(ranks(script, 1)) == End(0)
    assert wait_for(lambda: is_gone(int((tmp_path / "child").read_text())))


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGUSR1),
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_signals_reach_the_ranks_which_save_and_stop(launcher, sent: signal.Signals, received: signal.Signals) -> None:
    process = launcher(SAVES.format(signal=int(received)))
    process.send_signal(sent)
    assert process.wait(timeout=10) == 75


def test_a_stopped_rank_is_woken_so_that_it_saves_too(launcher, tmp_path: Path) -> None:
    script = "pathlib.Path(f'pid-{rank}').write_text(str(os.getpid()));"
    process = launcher(script + SAVES.format(signal=15))
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 75


def test_ranks_that_do_nothing_after_the_signal_are_killed(launcher, tmp_path: Path) -> None:
    """Rank 1 never answers and rank 0 waits for it, as in a collective: without an end the launcher waits forever."""
    script = (
        "pathlib.Path(f'pid-{rank}').write_text(str(os.getpid()));"
        "signal.signal(15, signal.SIG_IGN); pathlib.Path(f'ready-{rank}').touch(); time.sleep(60)"
    )
    process = launcher(script)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 1
    assert time.monotonic() - begin < 5
    assert all(is_gone(int(path.read_text())) for path in tmp_path.glob("pid-*"))


@pytest.mark.parametrize("work", ["sum(range(10**6))", "open('out', 'a').write('x'); time.sleep(.1)"])
def test_a_job_that_works_after_the_signal_has_its_time(launcher, work: str) -> None:
    """Rank 0 saves for longer than the patience with ranks that do nothing; rank 1 waits for it."""
    saves = f"end = time.monotonic() + 2.2\n  while time.monotonic() < end:\n   {work}\n  os._exit(75)"
    handler = f"\ndef stop(*_):\n if rank == 0:\n  {saves}\n time.sleep(2.4); os._exit(75)\n"
    process = launcher(handler + "signal.signal(15, stop)\npathlib.Path(f'ready-{rank}').touch()\ntime.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) == 75


def test_a_rank_that_dies_of_the_signal_was_asked_to_stop(launcher) -> None:
    process = launcher("pathlib.Path(f'ready-{rank}').touch(); time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 75


def test_bad_input_is_said_by_the_rank_alone(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is first; rank 0, which speaks, is not stopped before it has spoken."""
    script = "rank == 0 and (time.sleep(.5), sys.stderr.write('error: it is wrong\\n')); os._exit(2)"
    assert run_ranks(ranks(script)).code == 2
    assert caplog.text == ""
    assert capfd.readouterr().err == "error: it is wrong\n"


def test_a_second_interrupt_stops_at_once(launcher, capfd: pytest.CaptureFixture[str]) -> None:
    process = launcher("signal.signal(15, signal.SIG_IGN);" + SAVES.format(signal=int(signal.SIGUSR1)))
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 1
    said = capfd.readouterr().err
    assert "killed by a second Ctrl-C, without a checkpoint" in said
    assert "SIGKILL" not in said, "nobody else killed the ranks"


def test_a_second_interrupt_reaches_other_sessions(launcher, tmp_path: Path) -> None:
    script = (
        "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(60)'];"
        "child = subprocess.Popen(sleep, start_new_session=True);"
        "pathlib.Path('child').write_text(str(child.pid)); signal.signal(15, signal.SIG_IGN);"
    )
    process = launcher(script + SAVES.format(signal=int(signal.SIGUSR1)), 1)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.wait(timeout=5) == 1
    assert wait_for(lambda: is_gone(int((tmp_path / "child").read_text())), seconds=2)


def test_the_ranks_die_with_the_launcher(launcher, tmp_path: Path) -> None:
    script = "signal.signal(15, signal.SIG_IGN); pathlib.Path(f'pid-{rank}').write_text(str(os.getpid()));"
    process = launcher(script + "pathlib.Path(f'ready-{rank}').touch(); time.sleep(60)")
    process.kill()
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    assert wait_for(lambda: all(map(is_gone, pids)), seconds=2)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_named_and_a_restart_takes_another_one(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 inherits the socket that the launcher has opened: nobody can take the port while it starts."""
    listens = (
        "import socket; at = os.environ.get('CAPT_LISTENS');"
        "s = socket.socket(fileno=int(at)) if at else None;"
        "ok = s.getsockname() == ('127.0.0.1', int(os.environ['MASTER_PORT'])) if s else rank == 1;"
        "sys.exit(0 if ok and os.environ['CAPT_SECRET'] else 1)"
    )
    with socket.create_server((address, 0)) as other:
        port = other.getsockname()[1]
        end = run_ranks(ranks(listens), port=port)
        assert (end.code, end.reason) == (2, caplog.messages[-1])
        assert f"--master-port {port}: Address already in use" in end.reason
        assert run_ranks(ranks(listens), port=port, begun=True).code == 1, "nobody has typed it anew"
        assert run_ranks(ranks(listens), port=port, again=True) == End(0)
    assert run_ranks(ranks(listens), port=port) == End(0)


def test_the_socket_of_several_hosts_is_open_to_others_and_closed_with_the_ranks() -> None:
    made = LocalRanks()
    port = made.listen(0, alone=False, again=False)
    with socket.create_connection((socket.gethostbyname(socket.gethostname()), port), 5):
        pass
    made.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_a_data_worker_that_is_suspended_is_named(tmp_path: Path) -> None:
    script = (
        "signal.signal(signal.SIGQUIT, signal.SIG_IGN);"
        "worker = subprocess.Popen(['sleep', '60']); worker.send_signal(signal.SIGSTOP);"
        f"pathlib.Path({str(tmp_path)!r}, 'worker').write_text(str(worker.pid)); time.sleep(60)"
    )
    made = LocalRanks()
    try:
        made.start((sys.executable, "-S", "-c", PRELUDE + script), {"RANK": "0"})
        assert wait_for(lambda: (tmp_path / "worker").exists() and (tmp_path / "worker").read_text())
        worker = (tmp_path / "worker").read_text()
        assert made.stacks(0)[1] == f"its data worker, process {worker}, is suspended"
        os.kill(made.where(0)[1], signal.SIGSTOP)
        assert wait_for(lambda: made.stacks(0)[1] == "it is suspended")
    finally:
        made.close()
