"""Files that a fresh machine fetches of a stored run."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.stores import StoreFile
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.loop import Run
from capt.pretrain.engine.metrics_file import METRICS
from capt.pretrain.engine.run_folder import BEST, CONFIG, LOCK, holds_run, require_run, resumes_by_itself
from capt.pretrain.engine.step_folders import MANIFEST, steps_of
from capt.pretrain.reliability import uploads
from capt.pretrain.reliability.uploads import Uploads
from tests.unit.data.faulty import faulty_store

STEPS = (2, 10, 9)
"""Complete checkpoints, not in the order of their numbers; step 12 is one whose copy was cut off."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    box = tmp_path / "box"
    for step in (*STEPS, 12):
        folder = box / f"checkpoints/step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "state.bin").write_text(f"state of {step}")
        if step in STEPS:
            (folder / MANIFEST).write_text(f"manifest of {step}")
    (box / CONFIG).write_text("{}")
    job = load_job("capt_tiny", [f"run.dir={tmp_path / 'run'}"])
    with faulty_store():
        yield job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"upload": f"faulty:/{box}"})})


def test_a_fresh_machine_continues_from_the_newest_complete_checkpoint(job: Job) -> None:
    Uploads().before_folder(job, resumes=True)
    assert steps_of(job.run.dir) == [10]
    latest = job.run.dir / "checkpoints/latest"
    assert (latest / "state.bin").read_text() == "state of 10"
    assert (latest / MANIFEST).read_text() == "manifest of 10"


def test_the_best_checkpoint_comes_along(job: Job, tmp_path: Path) -> None:
    best = {"step": 2, "metric": "valid/loss", "value": 1.0, "mode": "min"}
    (tmp_path / "box" / BEST).write_text(json.dumps(best))
    Uploads().before_folder(job, resumes=True)
    assert steps_of(job.run.dir) == [2, 10]
    assert (job.run.dir / "checkpoints/best/state.bin").read_text() == "state of 2"
    assert (job.run.dir / "checkpoints/latest/state.bin").read_text() == "state of 10"


class _KilledError(BaseException):
    """A kill: nothing of the process runs after it."""


def _contents(run: Path) -> dict[str, str]:
    files = (path for path in run.rglob("*") if path.is_file() and path.name != LOCK)
    return {str(path.relative_to(run)): path.read_text() for path in files if "partial" not in str(path)}


@pytest.mark.parametrize("fault", ["kill", "full disk", "store"])
def test_a_fetch_that_is_cut_short_at_any_file_is_done_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Every file of the run in turn; by the same command, which its launcher must not refuse."""
    (tmp_path / "box" / BEST).write_text(json.dumps({"step": 2, "metric": "loss", "value": 1.0, "mode": "min"}))
    for name in ("metrics.jsonl", "ledger/launch-0001/rank-00000.ledger"):
        (tmp_path / "box" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "box" / name).write_text(f"{name}\n")
    job = job.model_copy(update={"run": job.run.model_copy(update={"resume": "auto"})})
    Uploads().before_folder(job, resumes=True)
    whole, fetch = _contents(job.run.dir), uploads._fetch
    cuts = 0
    for number in range(100):
        shutil.rmtree(job.run.dir)
        left = number

        def cut(file: StoreFile, target: Path) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                fetch(file, target)
            elif fault == "full disk":
                raise OSError(errno.ENOSPC, "No space left on device", str(target))
            elif fault == "store":
                raise DataError(f"{file} could not be read in 6 attempts")
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                (target.parent / f".{target.name}.x.tmp").write_text("half")
                raise _KilledError

        monkeypatch.setattr(uploads, "_fetch", cut)
        try:
            Uploads().before_folder(job, resumes=True)
        except (_KilledError, DataError, OSError):
            cuts += 1
        monkeypatch.setattr(uploads, "_fetch", fetch)
        assert holds_run(job.run.dir) == (left >= 0), "the job of the run is the last file"
        assert not (fault != "kill" and list(job.run.dir.rglob("*.partial"))), "room for the next attempt"
        if left >= 0:
            break
        assert not resumes_by_itself(job.run.dir, job)
        with pytest.raises(ConfigError, match=r"--resume auto again|name a folder that a job wrote"):
            require_run(job.run.dir)
        Uploads().before_folder(job, resumes=True)
        assert {name: text for name, text in _contents(job.run.dir).items() if not name.endswith(".tmp")} == whole
        assert (job.run.dir / "checkpoints/latest/state.bin").read_text() == "state of 10"
    assert cuts == 2 * len({2, 10}) + 4, "each file was cut once"


def test_two_hosts_that_fetch_into_one_folder(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, and finds the run there."""
    fetch, fetched = uploads._fetch, list[Path]()

    def slowly(file: StoreFile, target: Path) -> None:
        time.sleep(0.02)
        fetched.append(target)
        fetch(file, target)

    monkeypatch.setattr(uploads, "_fetch", slowly)
    monkeypatch.setattr(uploads, "PATIENCE", 20.0)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(Uploads().before_folder, job, resumes=True) for _ in range(2)]:
            each.result()
    assert len(fetched) == len(set(fetched)) == 3
    assert steps_of(job.run.dir) == [10]


def test_leftovers_that_the_store_does_not_have_are_set_aside(job: Job) -> None:
    """They are of another future of the run, or damaged, and would be continued as the newest ones."""
    for step, manifest in ((9, "manifest of 9"), (10, "another manifest"), (20, "manifest of 20")):
        folder = job.run.dir / f"checkpoints/step-{step:08}"
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(manifest)
    Uploads().before_folder(job, resumes=True)
    assert steps_of(job.run.dir) == [9, 10]
    assert (job.run.dir / "checkpoints/latest" / MANIFEST).read_text() == "manifest of 10"
    assert len(list(job.run.dir.glob("checkpoints/other-step-*"))) == 2


@pytest.mark.parametrize("loss", ["folder", "manifest", "content"])
def test_a_lost_or_damaged_checkpoint_is_fetched_again(job: Job, tmp_path: Path, loss: str) -> None:
    (tmp_path / "box" / METRICS).write_text("row of 10\n")
    Uploads().before_folder(job, resumes=True)
    with (job.run.dir / METRICS).open("a") as file:
        file.write("row of 11\n")  # the run continued here
    newest = job.run.dir / "checkpoints/step-00000010"
    if loss == "folder":
        shutil.rmtree(newest)
    elif loss == "manifest":
        (newest / MANIFEST).unlink()
    else:
        (newest / "state.bin").write_text("state 0f 10")
        assert Uploads().mend(job, newest)
        assert len(list(newest.parent.glob("damaged-step-00000010-*"))) == 1
    Uploads().before_folder(job, resumes=True)
    assert (newest / "state.bin").read_text() == "state of 10"
    assert (newest / MANIFEST).read_text() == "manifest of 10"
    assert (job.run.dir / METRICS).read_text() == "row of 10\nrow of 11\n"
    assert not Uploads().mend(job, newest.with_name("step-00000011")), "the store has no such checkpoint"


def test_where_the_copy_in_the_store_is_damaged_too_an_older_one_comes_along(job: Job, tmp_path: Path) -> None:
    """Half a checkpoint, with its manifest: a fresh machine would else never train again."""
    (tmp_path / "box/checkpoints/step-00000010/state.bin").unlink()
    Uploads().before_folder(job, resumes=True)
    newest = job.run.dir / "checkpoints/step-00000010"
    assert Uploads().mend(job, newest)
    assert steps_of(job.run.dir) == [9, 10]
    assert (newest.parent / "latest").resolve() == newest, "which one is whole, the ranks find out"


def test_a_run_folder_that_is_behind_the_store_is_refused(job: Job, tmp_path: Path) -> None:
    (tmp_path / "box" / METRICS).write_text("row of 9\n")
    Uploads().before_folder(job, resumes=True)
    Uploads().before_folder(job, resumes=True)  # as far as the store: what is here is continued
    newest = job.run.dir / "checkpoints/step-00000010"
    newest.rename(newest.with_name("step-00000009"))
    (tmp_path / "box" / METRICS).write_text("row of 9\nrow of 10\n")
    with pytest.raises(ConfigError, match=r"has the run's step 10, \S+ only 9: another machine has continued it"):
        Uploads().before_folder(job, resumes=True)


def test_a_run_folder_with_nothing_new_is_not_listed_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []

    def look(run: Path) -> list[int]:
        looks.append(run)
        return []

    monkeypatch.setattr(uploads, "steps_of", look)
    copier, run = Uploads(), object.__new__(Run)
    run.dir = tmp_path
    copier._url = f"faulty:/{tmp_path}/there"
    for committed in (0, 0, 0, 1, 1):
        run.committed = committed
        copier.after_step(run, {})
    assert len(looks) == 2


def test_records_are_read_beside_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledgers of a thousand ranks are gigabytes, which rank 0 would read while all others wait."""
    run, box, read_by = tmp_path / "run", tmp_path / "box", list[threading.Thread]()
    for name in ("metrics.jsonl", "ledger/launch-0001/rank-00007.ledger", f"{uploads._name(3)}/{MANIFEST}"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        read_by.append(threading.current_thread())
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    with faulty_store():
        copier = Uploads()
        copier._url = f"faulty:/{box}"
        copier._begin(run, uploads._name(3))
        assert copier._thread is not None
        copier._thread.join()
    assert (box / "ledger/launch-0001/rank-00007.ledger").read_text() == "{}"
    assert set(read_by) == {copier._thread}
