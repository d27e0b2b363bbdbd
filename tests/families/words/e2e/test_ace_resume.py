"""A finished run continues for more epochs: its steps were made of its epochs, and are made anew."""

from __future__ import annotations

import os
from pathlib import Path

from tests.embeddings import write_text
from tests.runs import training_rows
from tests.support import run_capt


def test_a_run_that_is_done_goes_on_with_more_epochs(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt", 3000)
    env = dict(os.environ)
    settings = ["data.files=text.txt", "data.min_count=2", "model.dim=4", "batch.global=1024", "data.workers=1"]
    settings += ["run.dir=run", "run.log_every=1", "run.threads=1", "run.tensorboard=false", "data.cache=cache"]

    def capt(*arguments: str) -> str:
        done = run_capt(*arguments, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def steps() -> list[int]:
        return [row["step"] for row in training_rows(tmp_path / "run")]

    capt("pretrain", "ace/skipgram", *settings, "schedule.epochs=1")
    assert steps() == [1, 2, 3]
    assert "run is done: all 3 steps; raise schedule.epochs to continue" in capt("resume", "run")
    capt("resume", "run", "schedule.epochs=2")
    config = (tmp_path / "run" / "config.yaml").read_text()
    refused = run_capt("resume", "run", "schedule.epochs=1", cwd=tmp_path, env=env)
    assert (refused.returncode, "6 steps are trained already" in refused.stderr) == (2, True), refused.stderr
    assert (tmp_path / "run" / "config.yaml").read_text() == config
    assert steps() == [1, 2, 3, 4, 5, 6]
    capt("resume", "run", "schedule.epochs=3", "schedule.max_steps=7")  # both are given: the smaller holds
    assert steps() == [1, 2, 3, 4, 5, 6, 7]
