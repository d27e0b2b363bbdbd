"""A job that lost a rank, or whose rank hangs, continues by itself, and ends as if nothing had happened."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from capt.launcher.backends.local import run_ranks
from capt.launcher.backends.watching import Watcher
from capt.launcher.plan import Command, End, Launch, Options
from capt.launcher.requeue import again
from capt.launcher.restart import outlast, supervise
from capt.launcher.supervisor.heartbeats import Pulse
from capt.launcher.supervisor.output import takes_output
from capt.launcher.supervisor.processes import stop_asked, stop_signals
from capt.launcher.supervisor.ranks import LocalRanks
from capt.pretrain.base.files import write_text
from capt.pretrain.base.verification import VerifiedFile, Verifier, file_state, read_verified, sha256, write_verified
from capt.pretrain.config.load import job_from_mapping, load_job
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.engine.run_folder import Status, read_status, write_status
from capt.pretrain.registry import TASKS
from capt.pretrain.reliability.ledger.check import check
from capt.pretrain.reliability.rollbacks import read_rollbacks
from tests import runs
from tests.support import free_port, run_head

TASKS["toy"] = "tests.toy"
STEPS = 12


def _mapping(run_dir: Path, **changes: Any) -> dict[str, Any]:
    return {
        "task": {"type": "toy"},
        "run": {"dir": str(run_dir), "log_every": 1, "tensorboard": False, "threads": 1},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"max_steps": STEPS, "warmup_steps": 2},
        "optimizer": {"lr": 1e-2},
        "validate": {"every": 0},
        "checkpoint": {"every": 2, "keep": 2},
        "supervise": {"restarts": 2, "stall": 2.0},
        **changes,
    }


def _nothing() -> None:
    """Leave the run alone between two attempts."""


def _cut_short(checkpoints: Path, name: str) -> None:
    if (path := checkpoints / "step-00000006" / name).exists() and not list(checkpoints.glob("damaged-*")):
        path.write_bytes(path.read_bytes()[:-9])


def _empty_all(checkpoints: Path) -> None:
    for path in checkpoints.glob("step-*/state.json"):
        path.write_bytes(b"")


def _take_away(run: Path, once: Path, number: int) -> None:
    """From now on, what this process and its ranks do with files of the run fails for two seconds after ``once``."""
    look = os.stat

    def failing(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            if not isinstance(path, int) and str(path).startswith(str(run)):
                with suppress(FileNotFoundError):
                    if time.time() - look(once).st_mtime < 2.0:
                        raise OSError(number, os.strerror(number), str(path))
            return act(path, *arguments, **named)

        return call

    for name in ("open", "stat", "lstat", "mkdir", "rename", "replace", "unlink", "utime", "scandir", "listdir"):
        setattr(os, name, failing(getattr(os, name)))
    io.open = builtins.open = failing(builtins.open)


def _supervised(
    mapping: dict[str, Any],
    world: int = 2,
    after: Callable[[], None] = _nothing,
    before: Callable[[], None] = _nothing,
) -> tuple[int, list[End]]:
    """The exit code, and the end of every attempt; ``before`` is called before the first, ``after`` behind each."""
    job = job_from_mapping(mapping, "test")
    path = job.run.dir.parent / f"{job.run.dir.name}.yaml"
    write_text(path, job_to_yaml(job))
    return run_head(_supervise, path, world, after, before)


def _supervise(path: Path, world: int, after: Callable[[], None], before: Callable[[], None]) -> tuple[int, list[End]]:
    TASKS["toy"] = "tests.toy"
    before()
    ends: list[End] = []

    def attempt(launch: Launch) -> End:
        port = str(free_port())
        commands = tuple(
            Command(
                (sys.executable, "-m", "tests.toy", *launch.arguments),
                {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                },
            )
            for rank in range(world)
        )  # fmt: skip
        ends.append(run_ranks(commands, stall=launch.job.supervise.stall))
        waited = ends[-1].code == 1 and outlast(launch)
        after()
        return replace(ends[-1], lost_host=waited)

    launch = Launch("capt.pretrain", (str(path), "--merged"), load_job(path, resolved=True), Options())
    return supervise(launch, attempt).code, ends


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert _supervised(_mapping(run)) == (0, [End(0)])
    return runs.losses(run)


@pytest.mark.slow
def test_a_rank_whose_weights_differ_ends_the_attempt_and_the_next_one_goes_on(
    tmp_path: Path, undisturbed: dict[int, float], capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fault = {"kind": "flip", "step": 7, "rank": 1, "once": str(tmp_path / "struck")}
    code, ends = _supervised(_mapping(run, fault=fault, engine={"zero_stage": 0}))
    assert (code, [end.code for end in ends]) == (0, [1, 0])
    assert "differs in model.norm.weight" in capfd.readouterr().err
    assert runs.losses(run) == pytest.approx(undisturbed, rel=1e-6)  # of ZeRO 1: sums in another order


@pytest.mark.slow
def test_a_spike_is_gone_back_for_without_a_restart_being_counted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {
        "schedule": {"max_steps": 46},
        "optimizer": {"lr": 1e-3},
        "guard": {"spike": "rollback"},
        "bad_samples": [8 * 37, 8 * 41],
        "supervise": {"restarts": 1},
    }
    code, ends = _supervised(_mapping(run, **changes))
    assert (code, [end.code for end in ends]) == (0, [1, 1, 0])
    assert [each.step for each in read_rollbacks(run)] == [38, 40]
    report = check(run)
    assert report.faults == []
    assert report.left_out == 32
    assert [(each.start, each.end) for each in read_rollbacks(run)] == [(288, 304), (320, 336)]


@pytest.mark.parametrize(
    "kind",
    ["kill", pytest.param("stop", marks=pytest.mark.slow), "hang", pytest.param("crash", marks=pytest.mark.slow)],
)
def test_a_fault_of_a_rank_costs_the_steps_since_the_last_checkpoint(
    tmp_path: Path, undisturbed: dict[int, float], capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    run = tmp_path / "run"
    fault = {"kind": kind, "step": 7, "rank": 1, "once": str(tmp_path / "struck")}
    begin = time.monotonic()
    code, ends = _supervised(_mapping(run, fault=fault))
    assert (code, [end.code for end in ends]) == (0, [1, 0])
    assert time.monotonic() - begin < 120  # far less than the time-out of the process group
    assert runs.losses(run) == undisturbed
    assert check(run).faults == []
    status = read_status(run)
    assert status is not None
    assert (status.state, status.step) == ("done", STEPS)
    (crash,) = runs.crashes(run)
    assert (crash["step"], crash["section"]) == (6, "step")  # six were done
    assert (
        crash["rank"] == 1 or kind == "hang"
    )  # both are in their step: on a busy machine the other may be there longer
    assert crash["signal"] == ("SIGKILL" if kind == "kill" else None)
    if kind == "crash":  # what has ended the rank is told, and where
        assert crash["cause"] == "rank 1 exited with 1: RuntimeError: a fault of the program"
        assert "in strike" in crash["stacks"]
    if kind == "kill":  # the other rank fell over its connection, which is a matter of its log
        assert "Traceback" not in capfd.readouterr().err
        assert "Traceback" in (run / "log" / "rank-0.log").read_text()
    if kind in ("stop", "hang"):
        assert f"rank {crash['rank']} hangs" in crash["cause"]
        assert ("it is suspended" in crash["cause"]) == (kind == "stop")
    if kind == "hang":
        assert ("strike" in crash["stacks"]) == (
            crash["rank"] == 1
        )  # where it hangs, though it holds the interpreter's lock


@pytest.mark.parametrize(
    "name",
    [
        "model-optimizer-00001-of-00002.safetensors",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("config.yaml", "manifest.json")),
    ],
)
def test_a_job_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    tmp_path: Path, undisturbed: dict[int, float], capfd: pytest.CaptureFixture[str], name: str
) -> None:
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    fault = {"kind": "kill", "step": 7, "rank": 1, "once": str(tmp_path / "struck")}
    code, ends = _supervised(_mapping(run, fault=fault), after=partial(_cut_short, checkpoints, name))
    assert (code, [end.code for end in ends]) == (0, [1, 0])
    assert runs.losses(run) == undisturbed
    assert check(run).faults == []
    assert [path.name for path in checkpoints.glob("damaged-*/manifest.json")]
    said = capfd.readouterr().err
    assert f"step-00000006/{name}" in said
    assert "The run starts again by itself, from step-00000004" in said


def _rot(checkpoints: Path) -> None:
    """A bit of a file that this host has verified goes over on the disk: nothing that ``stat`` tells changes."""
    if list(checkpoints.glob("damaged-*")):
        return
    path = checkpoints / "step-00000006" / "model-weights-00000-of-00002.safetensors"
    recorded = sha256(path)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    memory = Verifier()._memory
    write_verified(memory, [VerifiedFile(str(path), file_state(path.stat()), recorded, "")])
    assert read_verified(memory)


@pytest.mark.slow
def test_a_file_that_this_host_remembers_is_read_before_it_is_loaded(
    tmp_path: Path, undisturbed: dict[int, float], capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fault = {"kind": "kill", "step": 7, "rank": 1, "once": str(tmp_path / "struck")}
    code, ends = _supervised(_mapping(run, fault=fault), after=partial(_rot, run / "checkpoints"))
    assert (code, [end.code for end in ends]) == (0, [1, 0])
    assert runs.losses(run) == undisturbed
    assert "is damaged: expected SHA-256" in capfd.readouterr().err


def test_what_an_update_has_made_no_number_is_not_saved(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run = tmp_path / "run"
    fault = {"kind": "nan_update", "step": 8, "rank": 1, "once": str(tmp_path / "struck")}
    code, ends = _supervised(_mapping(run, fault=fault))
    assert (code, len(ends)) == (1, 1)
    status = read_status(run)
    assert status is not None
    assert "is not finite on rank 1 after the update of step 8" in status.reason
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-00000004", "step-00000006"]


def _spoil(checkpoints: Path) -> None:
    """A moment of the optimizer in the newest checkpoint is one that no update leaves; the digests fit."""
    if list(checkpoints.glob("diverged-*")):
        return
    folder = checkpoints / "step-00000006"
    manifest = json.loads((folder / "manifest.json").read_text())
    for path in folder.glob("model-optimizer-*"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.startswith("exp_avg_sq"):
                tensor.fill_(-1.0)
        save_file(tensors, path)
        manifest["files"][path.name] = {"size": path.stat().st_size, "sha256": sha256(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.slow
def test_a_job_whose_loss_is_no_number_right_after_a_resume_goes_one_checkpoint_back(
    tmp_path: Path, undisturbed: dict[int, float], capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fault = {"kind": "kill", "step": 7, "rank": 1, "once": str(tmp_path / "struck")}
    changes = {"fault": fault, "supervise": {"restarts": 1, "stall": 2.0}}
    code, ends = _supervised(_mapping(run, **changes), after=partial(_spoil, run / "checkpoints"))
    assert (code, [end.code for end in ends]) == (0, [1, 1, 0])
    assert runs.losses(run) == undisturbed
    assert "step-00000006 is set aside as diverged-step-00000006" in capfd.readouterr().err


@pytest.mark.slow
def test_a_job_all_of_whose_checkpoints_are_damaged_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    fault = {"kind": "kill", "step": 7, "rank": 1, "once": str(tmp_path / "struck")}
    code, ends = _supervised(_mapping(run, fault=fault), after=partial(_empty_all, run / "checkpoints"))
    assert (code, [end.code for end in ends]) == (2, [1, 2])
    assert "the run has no earlier checkpoint" in capfd.readouterr().err


def test_with_local_checkpoints_a_killed_rank_costs_the_step_it_was_in(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    run = tmp_path / "run"
    fault = {"kind": "kill", "step": 8, "rank": 1, "once": str(tmp_path / "struck")}
    checkpoint = {"every": 6, "local": {"every": 1, "dir": str(tmp_path / "memory")}}
    code, ends = _supervised(_mapping(run, fault=fault, checkpoint=checkpoint))
    assert (code, [end.code for end in ends]) == (0, [1, 0])
    assert "at step 7" in (run / "log" / "rank-0.log").read_text()
    assert runs.losses(run) == undisturbed
    report = check(run)
    assert report.faults == []
    assert [(each.head.step, each.kept) for each in report.launches] == [(0, 7), (7, 5)]
    assert list((tmp_path / "memory").iterdir()) == []


def test_a_file_system_that_is_away_for_seconds_is_waited_for(
    tmp_path: Path, undisturbed: dict[int, float], capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks and launcher use the run folder: if either meets the outage, the job continues after it."""
    run, once = tmp_path / "run", tmp_path / "struck"
    fault = {"kind": "outage", "step": 7, "rank": 0, "once": str(once)}
    mapping = _mapping(run, fault=fault, supervise={"restarts": 1, "stall": 2.0})
    code, ends = _supervised(mapping, before=partial(_take_away, run, once, errno.ESTALE))
    assert (code, [end.code for end in ends]) == (0, [1, 0])
    assert runs.losses(run) == undisturbed
    assert check(run).faults == []
    assert "Stale file handle; the network file system has lost the file; waiting up to 30 minutes" in (
        capfd.readouterr().err
    )


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EROFS])
@pytest.mark.parametrize("call", ["read_bytes", "utime"])
def test_every_kind_of_outage_is_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    job = job_from_mapping(_mapping(tmp_path, supervise={"wait_minutes": 0.01}), "test")
    launch = Launch("capt.pretrain", (), job, Options())
    write_status(tmp_path, Status(state="running"))
    assert not outlast(launch)
    left = [5]

    def away(*_: object, **__: object) -> bytes:
        left[0] -= 1
        if left[0] > 0:
            raise OSError(number, os.strerror(number), "run")
        return b""

    monkeypatch.setattr("capt.launcher.restart._POLL", 0.01)
    monkeypatch.setattr("capt.launcher.restart._READ_ONLY", 0.6)
    monkeypatch.setattr(f"capt.launcher.restart.{call}" if call == "read_bytes" else f"os.{call}", away)
    assert outlast(launch)
    assert left == [0]
    left[0] = 10**9
    assert outlast(launch)


@pytest.mark.parametrize("every", [1, 7, 500])
@pytest.mark.parametrize("checkpoints", [1, 3, 5, 6, 9, 10, 25])
def test_restarts_are_given_back_for_ten_checkpoints_each(tmp_path: Path, every: int, checkpoints: int) -> None:
    """A job of weeks meets many faults; what fails again and again without progress still ends."""
    limit, faults = 3, 60
    allowed = []
    for number in range(faults):
        write_status(tmp_path, Status(state="running", step=1 + number * checkpoints * every))
        allowed.append(again(tmp_path, 1, limit, "job", every=every))
        if not allowed[-1]:
            break
    unpaid = [number - number * checkpoints // 10 for number in range(faults)]
    expected = next((number for number, used in enumerate(unpaid) if used >= limit), faults)
    assert sum(allowed) == (faults if checkpoints >= 10 else expected)


def test_restarts_are_given_back_for_an_hour_each(tmp_path: Path) -> None:
    for seconds, expected in ((3600.0, 20), (1800.0, 5), (0.0, 3)):
        allowed = 0
        while allowed < 20:
            write_status(tmp_path, Status(state="running", step=1 + allowed))
            if not again(tmp_path, 1, 3, f"job-{seconds}", every=0, seconds=seconds):
                break
            allowed += 1
        assert allowed == expected


def test_a_fault_that_comes_back_at_once_ends_the_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, ends = _supervised(_mapping(run, fault={"kind": "kill", "step": 3, "rank": 0}))
    assert (code, len(ends)) == (1, 2)  # the second time it made no step more than the first


@pytest.mark.parametrize(("fault", "expected"), [({"kind": "nan", "step": 3}, 1), ({"kind": "refuse", "step": 0}, 2)])
def test_what_would_come_out_the_same_again_is_not_tried_again(
    tmp_path: Path, fault: dict[str, Any], expected: int
) -> None:
    code, ends = _supervised(_mapping(tmp_path / "run", fault=fault), world=1)
    assert (code, len(ends)) == (expected, 1)


@pytest.mark.slow
def test_without_restarts_the_first_fault_is_the_end(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path / "run", fault={"kind": "kill", "step": 5}, supervise={"restarts": 0})
    code, ends = _supervised(mapping, world=1)
    assert (code, len(ends)) == (1, 1)
    assert len(runs.crashes(tmp_path / "run")) == 1


@pytest.mark.parametrize("inside", [True, False])
def test_a_job_that_was_asked_to_stop_is_not_started_again_however_it_ended(tmp_path: Path, inside: bool) -> None:
    run = tmp_path / "run"
    run.mkdir()
    job = job_from_mapping(_mapping(run), "test")
    write_text(run / "config.yaml", job_to_yaml(job))
    attempts = []

    def attempt(launch: Launch) -> End:
        attempts.append(launch)
        with stop_signals(lambda _: None, lambda: None):
            for _ in range(2 * inside):  # Ctrl-C twice: all ranks are killed
                signal.raise_signal(signal.SIGINT)
        if not inside:
            signal.raise_signal(signal.SIGTERM)
        return End(1, "rank 0 was killed by SIGKILL")

    assert supervise(Launch("capt.pretrain", (), job, Options()), attempt).code == 1
    assert len(attempts) == 1
    with stop_signals(lambda _: None, lambda: None):  # the next job does not inherit it
        assert not stop_asked()


class _Seen(LocalRanks):
    """Ranks of which only what is seen of them is there."""

    def __init__(
        self, codes: tuple[int | None, ...], suspended: int | None = None, first: int | None = None,
        section: str = "step", waits: int | None = None, seconds: float = 9.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.codes, self._suspended, self._first = list(codes), suspended, first
        self._section, self.waits, self.seconds = section, waits, seconds

    def look(self, seconds: float) -> None:
        time.sleep(seconds)

    def pulse(self, rank: int) -> Pulse:
        failed = None if self._first is None else 1.0 + (rank == self._first)
        return Pulse(self._section, 6, self.seconds - rank, 5, 0.1, failed)

    def where(self, rank: int) -> tuple[str, int]:
        return f"node-{rank}", 1

    def is_suspended(self, rank: int) -> bool:
        return rank == self._suspended

    def waits_for_files(self, rank: int) -> bool:
        return rank == self.waits

    def stacks(self, rank: int) -> tuple[str, str]:
        return "", "it is suspended" if rank == self._suspended else ""


@pytest.mark.parametrize(
    ("codes", "culprit"), [((1, -9), 1), ((-9, 1), 0), ((1, 1), 0), ((0, 1), 1), ((75, 0), None), ((1, None), 0)]
)
def test_the_rank_that_a_signal_killed_is_named_before_those_that_fell_over_it(
    codes: tuple[int | None, ...], culprit: int | None
) -> None:
    end = Watcher(_Seen(codes), grace=0.1).watch()
    assert end.code == 1
    assert (end.crash.rank if end.crash else None) == culprit


@pytest.mark.parametrize("first", [0, 1, 2])
def test_of_ranks_with_errors_the_one_that_had_the_first_is_named(first: int) -> None:
    """The others lost the connection to it, and may be gone before it is."""
    crash = Watcher(_Seen((1, 1, 1), first=first), grace=0.1).watch().crash
    assert crash is not None
    assert crash.rank == first


def test_ranks_that_wait_for_a_terminal_that_was_stopped_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S for a look at the last lines must not cost a restart; the time counts from when output is taken again."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(1 << 12))
    monkeypatch.setattr("capt.launcher.supervisor.ranks.takes_output", lambda: takes_output([writing]))
    ranks = _Seen((None,))
    watcher = Watcher(ranks, stall=0.2)
    monkeypatch.setattr(watcher, "_awake", time.monotonic() - 100)
    assert watcher._find_stall(0.2) is None
    os.read(reading, 1 << 16)
    assert takes_output([writing])
    assert watcher._find_stall(0.2) is None
    time.sleep(0.6)  # beyond three times the longest step and the rest
    assert watcher._find_stall(0.2) is None, "it may wait for a file system"
    time.sleep(0.7)
    assert watcher._find_stall(0.2) is not None
    os.close(reading)
    assert takes_output([writing]), "nobody waits for a pipe without an end"
    os.close(writing)
    assert takes_output([writing])


@pytest.mark.parametrize(("suspended", "culprit"), [(None, 0), (1, 1), (0, 0)])
def test_of_ranks_equally_far_the_suspended_one_is_named(
    suspended: int | None, culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = Watcher(_Seen((None, None), suspended), stall=1.0)
    monkeypatch.setattr(watcher, "_awake", time.monotonic() - 100)
    crash = watcher.watch().crash
    assert crash is not None
    assert (crash.rank, crash.host) == (culprit, f"node-{culprit}")
    assert ("it is suspended" in crash.cause) == (suspended is not None)


@pytest.mark.parametrize(
    ("section", "waits", "suspended", "patient"),
    [
        ("step", None, None, False),
        ("step", 0, None, True),
        ("step", 1, None, True),  # the others wait for it in a collective
        ("data", 1, None, True),
        ("save", None, None, True),
        ("local", None, None, True),
        ("save", None, 1, False),
        ("step", 1, 0, False),
    ],
)
def test_a_rank_that_waits_for_files_or_writes_has_minutes(
    section: str, waits: int | None, suspended: int | None, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = _Seen((None, None), suspended, section=section, waits=waits, seconds=14.0)
    watcher = Watcher(ranks, stall=1.0)
    monkeypatch.setattr(watcher, "_awake", time.monotonic() - 1000)
    found = []
    for now in (1000.0, 1000.5, 1001.0, 1001.5):  # a moment in which nothing is seen to wait counts for nothing
        ranks.waits = None if now == 1000.5 else waits
        monkeypatch.setattr("capt.launcher.backends.watching.time.monotonic", lambda now=now: now)
        watcher._awake = 0.0
        found.append(watcher._find_stall(1.0))
    assert [each is None for each in found[2:]] == [patient] * 2
    ranks.seconds = 400.0
    stalled = watcher._find_stall(1.0)
    assert stalled is not None
    monkeypatch.undo()
    assert watcher._end_by_stall(stalled).slow_files == patient
