"""Rank 0 on a full disk: the run continues, and what it could not write is said once."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from capt.pretrain.base.errors import NoSpaceError, user_text
from capt.pretrain.base.files import write_bytes
from capt.pretrain.engine.callbacks.metrics import Metrics
from capt.pretrain.engine.durable import GrowingFile, write_error
from capt.pretrain.engine.loop import Run
from capt.pretrain.engine.run_status import _RankLog
from capt.pretrain.engine.task import Progress
from tests.toy.config import ToyJob
from tests.toy.task import ToyTask


class _FullBoard:
    """TensorBoard, whose thread has found the disk full."""

    def add_scalar(self, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def _metrics(folder: Path) -> tuple[Metrics, Run]:
    job = ToyJob.model_validate({"task": {"type": "toy"}})
    metrics = Metrics()
    metrics._file = GrowingFile(folder / "metrics.jsonl")
    return metrics, Run(job, folder, ToyTask(job, folder), {}, Progress())


def test_a_row_that_a_full_disk_took_half_of_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, run = _metrics(tmp_path)
    write, room = os.write, [7, 0, 0]

    def full(file: int, content: bytes) -> int:
        if not (left := room.pop(0) if room else len(content)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:left])

    monkeypatch.setattr("os.write", full)
    for step in (1, 2, 3):
        run.progress.step = step
        assert metrics.write(run, {"loss": 0.5}) == {"loss": 0.5}
    monkeypatch.undo()
    metrics.close(run)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    (said,) = caplog.messages
    assert said.endswith("metrics.jsonl'; training continues, and what is not written waits")


def test_without_tensorboard_a_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics, run = _metrics(tmp_path)
    metrics._board = _FullBoard()
    for _ in range(2):
        metrics.write(run, {"loss": 0.5})
    metrics.close(run)
    assert [message.rpartition("; ")[2] for message in caplog.messages] == ["training continues without TensorBoard"]


def test_another_error_of_a_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    metrics, run = _metrics(tmp_path)
    monkeypatch.setattr("os.write", broken)
    with pytest.raises(OSError, match=r"Input/output error.*metrics\.jsonl"):
        metrics.write(run, {"loss": 0.5})
    monkeypatch.undo()
    metrics.close(run)


class _FullFile(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_log_of_a_rank_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rank-0.log"
    with path.open("a") as file:
        handler = _RankLog(file, path)
        handler.setStream(_FullFile())
    logging.getLogger().addHandler(handler)
    logging.getLogger("capt.pretrain").warning("of interest")
    assert f"{path}: cannot be written any more: [Errno 28] No space left on device" in caplog.messages
    assert handler not in logging.getLogger().handlers


@pytest.mark.parametrize(
    ("number", "inodes", "words"),
    [
        (errno.ENOSPC, 5, "no space left on device: the file needs 10 bytes, "),
        (errno.ENOSPC, 0, "no inodes are left on this disk (df -i)"),
        (errno.EDQUOT, 5, "your quota on this disk is used up (quota -s)"),
    ],
)
@pytest.mark.parametrize("rust", [False, True])
def test_space_inodes_and_quota_are_named(
    tmp_path: Path, number: int, inodes: int, words: str, rust: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = os.statvfs(tmp_path)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_files=100, f_favail=inodes, f_bavail=facts.f_bavail,
                        f_frsize=facts.f_frsize, f_blocks=facts.f_blocks, f_bfree=facts.f_bfree))  # fmt: skip
    path = tmp_path / "a" / "b"
    error = Exception(f"I/O error (os error {number})") if rust else OSError(number, os.strerror(number), str(path))
    found = write_error(path, error, 10)
    assert isinstance(found, NoSpaceError)
    assert words in str(found)
    if not rust:
        assert words.partition(":")[0].lower() in (user_text(error) or "").lower()


def test_a_limit_of_the_size_of_files_is_named(tmp_path: Path) -> None:
    """``ulimit -f``, or a disk that takes no larger files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write_bytes(tmp_path / "weights", bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = f"{tmp_path / 'weights'}: File too large; raise the limit of the size of a file (ulimit -f unlimited)"
    assert (user_text(caught.value) or "").startswith(said)
    assert "ulimit -f" in str(write_error(tmp_path / "weights", caught.value))
