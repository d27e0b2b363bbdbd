"""What a fresh machine fetches of a run in a store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.loop import Run
from capt.pretrain.engine.run_folder import BEST, CONFIG
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


def test_a_run_folder_that_is_behind_the_store_is_refused(job: Job) -> None:
    Uploads().before_folder(job, resumes=True)
    Uploads().before_folder(job, resumes=True)  # as far as the store: what is here is continued
    newest = job.run.dir / "checkpoints/step-00000010"
    newest.rename(newest.with_name("step-00000009"))
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
