"""Message of a rank that fails: one line, by one rank, with the exit code of what went wrong."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from capt.pretrain import __main__ as entry
from capt.pretrain.base import distributed, errors
from capt.pretrain.base.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LockedError,
    MachineError,
    MissingModelError,
    NoSpaceError,
    UserError,
    is_outside,
)
from capt.pretrain.config import load_job
from capt.pretrain.engine import interruption
from capt.pretrain.engine.callbacks.agreement import TrainingDivergedError
from capt.pretrain.engine.run_folder import BAD_INPUT, FAILED, STOPPED, exit_code_of
from capt.pretrain.models.hf_config import local_folder
from tests.support import ClosedTerminal


def _agreed_error(error: Exception) -> Exception:
    with pytest.raises(UserError) as caught, distributed.synchronize_errors():
        raise error
    return caught.value


@pytest.mark.parametrize("error", [DataError("data.files: no text"), PermissionError(13, "Permission denied", "/a")])
def test_what_all_ranks_raise_is_said_by_rank_0(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert [entry._report(_agreed_error(error), rank, debug=False) for rank in (1, 0, 2)] == [2, 2, 2]
    said = "data.files: no text" if isinstance(error, DataError) else "/a: Permission denied"
    assert capsys.readouterr().err == f"error: {said}\n"


def test_an_error_that_travels_is_short() -> None:
    """Every rank receives as much from each of a thousand ranks as the longest has to say."""
    assert len(str(_agreed_error(DataError("no text " * 100_000)))) < 5000
    with pytest.raises(RuntimeError) as caught, distributed.synchronize_errors():
        raise ValueError("no text " * 100_000)
    assert len(str(caught.value)) < 5000


def test_what_all_ranks_would_warn_of_is_said_by_rank_0() -> None:
    """A thousand ranks read the same model; a full disk or a slow loader is that of one rank."""
    script = (
        "import logging, sys; from capt.pretrain.__main__ import set_up_log\n"
        "set_up_log(int(sys.argv[1]), debug=False)\n"
        "for name in ('models.hf_model', 'engine.loading'): logging.getLogger(f'capt.pretrain.{name}').warning(name)"
    )
    said = [
        subprocess.run([sys.executable, "-c", script, rank], capture_output=True, text=True, check=True).stderr
        for rank in ("0", "7")
    ]
    assert said == ["[rank 0] models.hf_model\n[rank 0] engine.loading\n", "[rank 7] engine.loading\n"]


@pytest.mark.parametrize("logger", entry._READ_ALIKE)
def test_rooms_that_rank_0_speaks_for_are_there(logger: str) -> None:
    assert importlib.util.find_spec(logger) is not None


def test_what_one_rank_raises_is_said_by_that_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry._report(OSError(28, "No space left on device", "/run/metrics.jsonl"), 3, debug=False) == 2
    text = "error: /run/metrics.jsonl: No space left on device; free some space, or use another disk\n"
    assert capsys.readouterr().err == text


def test_a_disk_or_file_server_that_fails_is_no_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """The job is started again: with 2 it would be over, for a fault that one host has had once."""
    error = OSError(errno.ESTALE, "Stale file handle", "/data/shard")
    assert [entry._report(_agreed_error(error), rank, debug=False) for rank in (1, 0)] == [1, 1]
    assert (
        capsys.readouterr().err == "error: /data/shard: Stale file handle; the network file system has lost the file\n"
    )
    wrapped = CheckpointError("/run/checkpoints: could not be written")
    wrapped.__cause__ = OSError(errno.EIO, "Input/output error")
    assert entry._report(_agreed_error(wrapped), 0, debug=False) == entry._report(wrapped, 0, debug=False) == 1
    assert entry._report(CheckpointError("damaged"), 0, debug=False) == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), "raise the limit of processes and threads: ulimit -u"),
        (
            OSError(errno.EAGAIN, "Resource temporarily unavailable"),
            "raise the limit of processes and threads: ulimit -u",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit: ulimit -n 65536"),
        (OSError(errno.ENFILE, "Too many open files in system"), "sysctl fs.file-max"),
    ],
)
def test_a_limit_that_is_reached_is_named(error: Exception, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry._report(error, 0, debug=False) == 2
    assert said in capsys.readouterr().err


def test_a_disk_that_turns_read_only_is_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EROFS, "Read-only file system", "/run/metrics.jsonl")
    monkeypatch.setattr(errors, "_MACHINE_ERRNOS", set(errors._MACHINE_ERRNOS))
    assert entry._report(error, 0, debug=False) == 2, "a run.dir on a read-only disk is a mistake of the user"
    errors.expect_writable_disks()
    assert entry._report(error, 0, debug=False) == 1


OUTSIDE: list[Callable[[], Exception]] = [
    lambda: DataError("data.files text.txt: no such file"),
    lambda: MachineError("port 29500: Address already in use"),
    lambda: NoSpaceError("a disk is full"),
    lambda: MissingModelError("model.init: no folder"),
    lambda: ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow"),
    *(
        partial(OSError, number, os.strerror(number), "/data/x")
        for number in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EMFILE)
    ),
]
TYPED: list[Callable[[], Exception]] = [
    lambda: ConfigError("optimizer.lr: below 0"),
    lambda: CheckpointError("another architecture"),
    lambda: UserError("no such option"),
]


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("way", ["here", "of another rank", "as the cause"])
def test_2_is_for_what_can_be_mended_by_typing(begun: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has begun had its files, ports and packages then: nothing was typed that could be wrong."""

    def fail(error: Exception) -> None:
        if way == "of another rank":  # which this one learns of, without the error itself
            verdict = distributed._verdict(error)
            monkeypatch.setattr(distributed, "gather_objects", lambda _: [verdict])
            with distributed.synchronize_errors():
                return
        if way == "as the cause":
            raise UserError("it could not be begun") from error
        raise error

    def code(make: Callable[[], Exception]) -> int:
        with pytest.raises(Exception) as caught, errors.machines_at_fault(lambda: begun):
            fail(make())
        return exit_code_of(caught.value)

    passing = {errno.ESTALE}
    for make in OUTSIDE:
        always = isinstance(error := make(), OSError) and error.errno in passing
        assert code(make) == (FAILED if begun or always else BAD_INPUT), error
    locked = STOPPED if way != "as the cause" else FAILED
    assert code(lambda: LockedError("another process is training")) == (locked if begun else BAD_INPUT)
    assert [code(make) for make in TYPED] == [BAD_INPUT] * len(TYPED)


READS = {
    "capt_adapt": ("model.init", "tokenizer.path", "data.files", "data.shards"),
    "capt_tiny": ("model.init", "tokenizer.path", "data.files"),
    "capt_vl_microworld": ("model.init", "tokenizer.path"),
    "pairs_tiny": ("model.init", "data.files"),
    "simcse_sup": ("model.init", "data.files"),
    "ptb/vae": ("data.path",),
}


def test_what_a_job_reads_and_is_gone_is_outside_of_it(tmp_path: Path) -> None:
    """Folders that were mounted when the run began."""
    text = tmp_path / "text.txt"
    text.write_text("one line\nanother line\n" * 20)
    for name, keys in READS.items():
        for key in keys:
            given = {} if key.startswith("data.") or name == "capt_vl_microworld" else {"data.files": text}
            given[key] = tmp_path / "gone" / "x"
            job = load_job(name, [f"{each}={path}" for each, path in given.items()])
            with pytest.raises(Exception) as caught:
                job.check_inputs()
            assert is_outside(caught.value), (name, key, caught.value)


def test_a_hub_that_is_away_is_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="the hub client is offline") as caught:
        local_folder(Path("user/away"))
    assert is_outside(caught.value)


def test_agreement_within_agreement_is_reached_once() -> None:
    inner = _agreed_error(DataError("x"))
    assert _agreed_error(inner) is inner


def test_a_fault_of_the_program_keeps_its_stack_trace(caplog: pytest.LogCaptureFixture) -> None:
    assert entry._report(ValueError("ours"), 1, debug=False) == 1
    assert caplog.records[0].exc_info


def test_a_run_that_diverged_needs_no_stack_trace(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    error = TrainingDivergedError("loss is nan at step 3")
    assert [entry._report(error, rank, debug=False) for rank in (1, 0)] == [1, 1]
    assert capsys.readouterr().err == "error: loss is nan at step 3\n"
    assert not caplog.records


def test_a_stop_signal_before_anything_was_read_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(exit_code: int) -> None:
        raise interruption.Interrupted("SIGTERM or Ctrl-C received before the first step")

    monkeypatch.setattr(interruption, "install", install)
    assert entry.run_process() == 75


def test_a_closed_terminal_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "install", lambda exit_code: None)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, ClosedTerminal())
    monkeypatch.setattr(entry, "main", lambda: entry._report(DataError("no text"), 0, debug=False))
    assert entry.run_process() == 2


def test_a_missing_configuration_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([str(tmp_path / "none.yaml")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
