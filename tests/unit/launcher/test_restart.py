"""Arguments with which a job is started again, and its checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capt.launcher.plan import UNATTENDED, End, Launch, Options
from capt.launcher.requeue import again
from capt.launcher.restart import supervise
from capt.launcher.supervisor.activity import Crash, write_crash
from capt.pretrain.base.errors import MachineError
from capt.pretrain.config.load import load_job
from capt.pretrain.engine.run_folder import BAD_INPUT, FAILED, STOPPED, Status, exit_code_of, write_status


def _checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def _set_aside(folder: Path) -> None:
    folder.rename(folder.with_name(f"abandoned-{folder.name}-1"))


def _arguments(run: Path, first: tuple[str, ...], goes_back: list[bool]) -> list[tuple[str, ...]]:
    """The arguments of each attempt; ``goes_back``: whether it sets the later checkpoints aside before it dies."""
    (run / "config.yaml").write_text("")
    seen = []

    def attempt(launch: Launch) -> End:
        seen.append(launch.arguments)
        if len(seen) > len(goes_back):
            return End(0)
        if goes_back[len(seen) - 1]:
            _set_aside(run / "checkpoints" / "step-00000004")
            _checkpoint(run, 4)  # of the new future
        return End(FAILED)

    job = load_job("capt_tiny", [f"run.dir={run}", "supervise.restarts=2"])
    supervise(Launch("capt.pretrain", first, job, Options()), attempt)
    return seen


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("capt.launcher.restart.again", lambda *args, **_: True)
    for step in (2, 4):
        _checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


def test_a_job_that_starts_again_waits_for_the_lock_of_a_lost_host(run: Path) -> None:
    _, second = _arguments(run, ("merged.yaml", "--merged", "--debug"), [False])
    assert second == (str(run / "config.yaml"), "--resume", "--debug", *UNATTENDED)
    config = str(run / "config.yaml")
    given = (config, "optimizer.lr=1e-4", "--resume")
    assert _arguments(run, given, [False, False])[1:] == [(*given, *UNATTENDED)] * 2


def test_a_host_that_is_lost_while_the_job_starts_again_does_not_end_it(tmp_path: Path) -> None:
    """Two faults together: the spare that has taken the place of a lost host dies as well."""
    (tmp_path / "config.yaml").write_text("")
    ends = [End(FAILED, lost_host=True), End(FAILED, lost_host=True), End(FAILED), End(FAILED)]
    job = load_job("capt_tiny", [f"run.dir={tmp_path}", "supervise.restarts=5"])
    assert supervise(Launch("capt.pretrain", (), job, Options()), lambda _: ends.pop(0)).code == FAILED
    assert ends == [], "the last two failed at one step, which ends the job"


def test_a_machine_that_lacks_something_is_tried_again_at_the_same_step(tmp_path: Path) -> None:
    """Data that are not mounted yet say nothing of the program; it is counted all the same."""
    failed = Status(state="failed", exit_code=1, reason="DataError: text.txt: no such file", passing=True)
    write_status(tmp_path, failed)
    assert [again(tmp_path, FAILED, 3, "7") for _ in range(4)] == [True, True, True, False]
    write_status(tmp_path, failed.model_copy(update={"passing": False}))
    assert [again(tmp_path, FAILED, 3, "8") for _ in range(2)] == [True, False]


def test_what_a_restart_finds_missing_is_no_bad_input(tmp_path: Path) -> None:
    """Also where the run had not begun when the command was given."""
    (tmp_path / "config.yaml").write_text("")
    answers: list[End | Exception] = [End(FAILED), MachineError("scontrol cannot be started")]

    def attempt(launch: Launch) -> End:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    job = load_job("capt_tiny", [f"run.dir={tmp_path}", "supervise.restarts=2"])
    with pytest.raises(MachineError) as caught:
        supervise(Launch("capt.pretrain", (), job, Options()), attempt)
    assert exit_code_of(caught.value) == FAILED
    answers.append(MachineError("at the first start"))
    with pytest.raises(MachineError) as caught:
        supervise(Launch("capt.pretrain", (), job, Options()), attempt)
    assert exit_code_of(caught.value) == BAD_INPUT


def test_the_cause_is_the_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.yaml").write_text("")
    job = load_job("capt_tiny", [f"run.dir={tmp_path}"])
    supervise(Launch("capt.pretrain", (), job, Options()), lambda _: End(FAILED, crash=Crash.here("it fell over")))
    assert "not started again" in caplog.messages[-2]
    assert caplog.messages[-1] == f"it fell over ({tmp_path / 'crashes' / '0002.json'})"


_UNREAD = """
import logging, os, sys
from pathlib import Path
from capt.launcher.plan import End, Launch, Options
from capt.launcher.restart import supervise
from capt.launcher.supervisor.activity import Crash
from capt.pretrain.config.load import load_job

logging.basicConfig(stream=sys.stderr)
run, ends = Path(sys.argv[1]), [End(1, crash=Crash.here("it fell over")), End(0)]
(run / "config.yaml").touch()
job = load_job("capt_tiny", [f"run.dir={run}"])
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
os._exit(supervise(Launch("capt.pretrain", (), job, Options()), lambda _: ends.pop(0)).code)
"""


def test_a_job_starts_again_although_nobody_reads_what_is_logged(tmp_path: Path) -> None:
    """A pager, Ctrl-S, a pipe to a program that hangs: the lines wait, the job does not."""
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", _UNREAD, str(tmp_path)], cwd=root, stderr=subprocess.PIPE) as head:
        try:
            assert head.wait(30) == 0
        finally:
            head.kill()
    assert (tmp_path / "crashes" / "0001.json").is_file()
    assert (tmp_path / "restarts.json").is_file()


def test_a_job_that_is_asked_to_stop_while_it_is_about_to_start_again_does_not(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "config.yaml").write_text("")
    attempts = []
    monkeypatch.setattr("capt.launcher.restart.again", lambda *args, **_: not signal.raise_signal(signal.SIGTERM))

    def attempt(launch: Launch) -> End:
        attempts.append(launch)
        return End(FAILED)

    job = load_job("capt_tiny", [f"run.dir={run}"])
    assert supervise(Launch("capt.pretrain", (), job, Options()), attempt).code == STOPPED
    assert len(attempts) == 1


def test_a_job_whose_restart_cannot_be_counted_has_failed_and_says_why(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Exit code 1 as the job had: 2 would say that its input was bad."""

    def again(*_: object, **__: object) -> bool:
        raise OSError(28, "No space left on device", str(run / "restarts.json"))

    (run / "config.yaml").write_text("")
    monkeypatch.setattr("capt.launcher.restart.again", again)
    job = load_job("capt_tiny", [f"run.dir={run}"])
    assert supervise(Launch("capt.pretrain", (), job, Options()), lambda _: End(FAILED)).code == FAILED
    assert "not started again: " in caplog.text
    assert "restarts.json: No space left on device; free some space" in caplog.text


def test_reports_of_crashes_are_counted_by_those_that_are_some(tmp_path: Path) -> None:
    """The name of a file must not keep a job from starting again."""
    folder = tmp_path / "crashes"
    folder.mkdir()
    others = ["0001-copy.json", "2024.txt", "7.json", "x.json", f"{'9' * 200}.json"]
    for name in (*others, *(f"{number:04d}.json" for number in range(9980, 10001))):
        (folder / name).touch()
    assert write_crash(tmp_path, Crash.here("it fell over")) == folder / "10001.json"
    kept = {f"{number:04d}.json" for number in range(9982, 10002)}
    assert {path.name for path in folder.iterdir()} == {*others, *kept}


def test_reports_of_crashes_go_into_no_folder_of_somebody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    for folder in (elsewhere, run):
        folder.mkdir()
    for number in range(30):
        (elsewhere / f"{number:04d}.json").touch()
    (run / "crashes").symlink_to(elsewhere)
    assert write_crash(run, Crash.here("it fell over")) is None
    assert len(list(elsewhere.iterdir())) == 30
    assert "a link is in the place of a folder of our own; remove it" in caplog.text


def test_a_job_that_dies_before_it_went_back_still_goes_back(run: Path) -> None:
    """Else it would continue with the future that it was told to leave."""
    given = (str(run / "config.yaml"), "--resume", "--checkpoint", "step-00000002")
    seen = _arguments(run, given, [False, True])
    assert seen == [given, (*given, *UNATTENDED), (given[0], "--resume", *UNATTENDED)]
