"""A resumed run continues with the sentences that it began with, unless it is told to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.latent.task import LatentTask
from tests.latent import small_job, write_text


def test_changed_sentences_are_refused_unless_allowed(tmp_path: Path) -> None:
    def task(*more: str) -> LatentTask:
        return LatentTask(small_job("vae", tmp_path, tmp_path / "run", *more), tmp_path / "run")

    write_text(tmp_path)
    state = task().save_state(tmp_path)
    task().load_state(tmp_path, state)

    path = tmp_path / "toy.train.txt"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([" ".join(reversed(first.split())), *rest]) + "\n")  # the same words as often
    with pytest.raises(CheckpointError, match=r"trained on other text.*data\.allow_change=true continues"):
        task().load_state(tmp_path, state)
    task("data.allow_change=true").load_state(tmp_path, state)
    del state["text"]  # as an earlier version wrote it
    task().load_state(tmp_path, state)


def test_sentences_of_both_splits_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_text(tmp_path)
    train = (tmp_path / "toy.train.txt").read_text().splitlines()
    (held_out,) = (path for path in tmp_path.iterdir() if ".valid" in path.name)
    known = {*train}
    own = [line for line in held_out.read_text().splitlines() if line not in known][:5]
    held_out.write_text("\n".join([*train[:3], *own]) + "\n")
    task = LatentTask(small_job("vae", tmp_path, tmp_path / "run"), tmp_path / "run")
    assert task.next_steps(Path("runs/x"))[0].startswith("capt latent sample runs/x "), "text is looked at first"
    assert f"validation text overlaps training text: 3 of {3 + len(own)} sentences are in both" in caplog.text
