"""What a fresh machine fetches of a run in a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.run_folder import BEST, CONFIG
from capt.pretrain.engine.step_folders import MANIFEST, steps_of
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
