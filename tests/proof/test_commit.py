"""The code that saves, against the model: killed before each call that changes a file, and on hosts that crash."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capt.pretrain.base.atomic import sync
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.callbacks import checkpointer
from capt.pretrain.engine.callbacks.checkpointer import Checkpointer
from capt.pretrain.engine.checkpoint import PendingSave, begin_save, layout, read_metadata, save, verify
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.loop import Run
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.engine.task import Progress
from capt.pretrain.registry import TASKS
from tests.proof.calls import Calls, Death
from tests.proof.disk import Disk, lay_out
from tests.proof.explore import RULES
from tests.proof.state import Settings, State
from tests.toy.task import ToyTask

TASKS["toy"] = "tests.toy"
STEPS = 2


class _Task(ToyTask):
    """Exports a folder, as language tasks do their tokenizer."""

    tokenizer = Path()

    def export_files(self) -> dict[str, Path]:
        return {"tokenizer": self.tokenizer}


def _run(run_dir: Path, tokenizer: Path) -> Run:
    """A run that continues from its newest checkpoint."""
    mapping = {
        "task": {"type": "toy"},
        "run": {"dir": str(run_dir)},
        "batch": {"global": 8, "micro": 8},
        "schedule": {"max_steps": STEPS, "warmup_steps": 0},
        "optimizer": {"lr": 0.01},
        "checkpoint": {"every": 1, "keep": 1},
        "engine": {"zero_stage": 0},
    }
    run_dir.mkdir(exist_ok=True)
    job = job_from_mapping(mapping, "test")
    task = _Task(job, run_dir)
    task.tokenizer = tokenizer
    engines = build_engines(task.build_modules(), job)
    found = checkpoints_of(run_dir)
    progress = Progress(**read_metadata(found[-1]).progress.model_dump()) if found else Progress()
    return Run(job, run_dir, task, engines, progress)


def _train(run: Run, committed: list[int]) -> None:
    """Run the loop without its steps. ``committed`` gets what ``commit`` has returned for."""
    saver = Checkpointer()
    saver.on_start(run)
    while not run.finished:
        run.progress.step += 1
        saver.after_step(run, {})
        committed.append(run.progress.step)
    saver.on_end(run)


def _found(run_dir: Path) -> tuple[int, ...]:
    """The steps of the checkpoints, each of which must be whole."""
    found = checkpoints_of(run_dir)
    for each in found:
        verify(each)
    return tuple(int(each.name[5:]) for each in found)


def _expected() -> list[tuple[int, ...]]:
    """List the steps that the model finds in a job of one rank at any moment, in its order."""
    state: State = Settings(hosts=(0,), faults=0, steps=STEPS).start()
    seen: list[tuple[int, ...]] = [()]
    while moves := [after for rule in RULES if not rule.help for _, after in rule.moves(state, Settings(steps=STEPS))]:
        (state,) = moves  # one rank without faults has one way
        steps = tuple(each.step for each in state.visible)
        if steps != seen[-1]:
            seen.append(steps)
    assert state.reported == STEPS
    return seen


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("a b c")
    return folder


def _calls(tmp_path: Path, tokenizer: Path) -> int:
    calls = Calls(tmp_path / "undisturbed")
    (tmp_path / "undisturbed").mkdir()
    with calls.watched():
        _train(_run(tmp_path / "undisturbed", tokenizer), [])
    return calls.count


def test_a_kill_before_any_call_leaves_what_the_model_says(tmp_path: Path, tokenizer: Path) -> None:
    expected, seen = _expected(), []
    for number in range(_calls(tmp_path, tokenizer) + 1):
        run_dir, committed = tmp_path / f"run-{number}", []
        run_dir.mkdir()
        try:
            with Calls(run_dir, death_before=number).watched():
                _train(_run(run_dir, tokenizer), committed)
        except Death:
            pass
        found = _found(run_dir)
        assert max(found, default=0) >= max(committed, default=0), f"killed before call {number}"
        if not seen or seen[-1] != found:
            seen.append(found)
        _train(_run(run_dir, tokenizer), [])
        assert _found(run_dir)[-1] == STEPS
        assert not list((run_dir / "checkpoints").glob(".*")), "what the killed job left is swept"
        shutil.rmtree(run_dir)
    assert seen == expected


def _crashes(run_dir: Path, tokenizer: Path) -> Iterator[tuple[str, tuple[tuple[str, str | bytes | None], ...], int]]:
    """After each call every tree that a crash of the host can leave, and the step that was committed by then."""
    disk, committed = Disk(run_dir.parent), [0]
    run_dir.parent.mkdir()
    trees: list[tuple[str, Any, int]] = []

    def told(call: str, path: str, other: str) -> None:
        disk.tell(call, path, other)
        words = f"{call} {Path(path).relative_to(run_dir.parent)}"
        trees.extend((words, disk.tree(kept), committed[-1]) for kept in disk.crashes())

    with Calls(run_dir.parent, told).watched():
        _train(_run(run_dir, tokenizer), committed)
    yield from trees


def _after_crash(tmp_path: Path, tokenizer: Path) -> str:
    """The first thing that is wrong after any crash; empty for nothing."""
    seen, place = set(), tmp_path / "after"
    for words, tree, committed in _crashes(tmp_path / "disk" / "run", tokenizer):
        if (tree, committed) in seen:
            continue
        seen.add((tree, committed))
        lay_out(tree, place)
        try:
            found = _found(place / "run")
        except CheckpointError as error:
            return f"after {words}: {error}"
        finally:
            shutil.rmtree(place)
        if max(found, default=0) < committed:
            return f"after {words}: step {committed} was committed, and {found} are found"
    assert len(seen) > 100
    return ""


def test_a_crash_of_the_host_loses_and_tears_nothing(tmp_path: Path, tokenizer: Path) -> None:
    assert _after_crash(tmp_path, tokenizer) == ""


def _nothing(path: Path) -> None:
    """In the place of ``sync``."""


def _files_alone(path: Path) -> None:
    """``sync`` that leaves folders out."""
    if path.is_file():
        sync(path)


@pytest.mark.parametrize(
    ("room", "name", "instead", "problem"),
    [
        (save, "sync", _nothing, "is damaged"),
        (save, "sync_tree", sync, "vocab.txt: missing"),
        (layout, "sync", _nothing, "missing"),
        (save, "sync", _files_alone, "was committed, and () are found"),
    ],
    ids=["bytes", "names in inner folders", "hiding of what is pruned", "the folder of all"],
)
def test_a_crash_of_the_host_shows_every_fsync_that_is_left_out(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, room: Any, name: str, instead: Any, problem: str
) -> None:
    monkeypatch.setattr(room, name, instead)
    assert problem in _after_crash(tmp_path, tokenizer)


def test_a_rank_of_a_job_before_cannot_write_into_a_checkpoint(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan = _run(tmp_path / "run", tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(PendingSave, "write", lambda save, *, asynchronous: None)
        orphan.progress.step = 1
        late = begin_save(orphan.dir, orphan.job, orphan.engines, orphan.task, orphan.progress, asynchronous=False)
    after = _run(tmp_path / "run", tokenizer)
    Checkpointer().on_start(after)
    after.progress.step = 1
    saved = begin_save(after.dir, after.job, after.engines, after.task, after.progress, asynchronous=False)
    with torch.no_grad():
        for parameter in orphan.engines["model"].module.parameters():
            parameter.add_(1.0)
    late.write(asynchronous=False)
    saved.commit()
    assert _found(after.dir) == (1,)
    with pytest.raises(CheckpointError, match="could not be written"):
        late.commit()
    assert _found(after.dir) == (1,)


@pytest.mark.parametrize("failing", ["symlink", "best"])
def test_a_committed_checkpoint_is_not_written_again(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Writing it again would remove it first, and a crash would leave neither."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = _run(tmp_path / "run", tokenizer)
    if failing == "best":
        run.job = run.job.model_copy(update={"checkpoint": run.job.checkpoint.model_copy(update={"best": "loss"})})
        run.validation, run.validated_at = {"loss": 1.0}, STEPS
        monkeypatch.setattr(checkpointer, "write_best", full)
    begun: list[int] = []
    monkeypatch.setattr(
        checkpointer, "begin_save", lambda *args, **kwargs: (begun.append(args[4].step), begin_save(*args, **kwargs))[1]
    )
    if failing == "symlink":
        monkeypatch.setattr(os, "symlink", full)
    _train(run, [])
    assert begun == [1, 2]
    assert _found(run.dir) == (STEPS,)
    assert run.failed_saves == (1 if failing == "best" else 0)
