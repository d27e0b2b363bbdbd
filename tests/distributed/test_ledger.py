"""The ledger of real runs: killed at random, on other numbers of ranks, fed wrongly, with a full disk."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.callbacks import checkpointer
from capt.pretrain.engine.durable import GrowingFile
from capt.pretrain.engine.run import run_job
from capt.pretrain.engine.task import RecordedTask
from capt.pretrain.language import batches
from capt.pretrain.language.batches import LanguageAssembler
from capt.pretrain.registry import TASKS, task_class
from capt.pretrain.reliability.ledger.check import Report, check
from capt.pretrain.reliability.ledger.files import launches_of, read_launch
from capt.pretrain.reliability.sample_ledger import SampleLedger
from tests.language import language_mapping, write_corpus
from tests.runs import losses, rows_of
from tests.support import run_ranks, start_ranks
from tests.toy.task import EPOCH
from tests.vision_language import vision_language_mapping

TASKS["toy"] = "tests.toy"
TASKS["toy_chunks"] = "tests.toy_chunks"
BATCH = 6


def _toy(run: Path, steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "task": {"type": "toy"},
        "run": {"dir": str(run), "log_every": 5, "tensorboard": False, "threads": 1},
        "batch": {"global": BATCH, "micro": None},
        "schedule": {"max_steps": steps},
        "optimizer": {"lr": 1e-3},
        "validate": {"every": 0},
        "checkpoint": {"every": 3, "keep": 2},
        **changes,
    }


def _train(mapping: dict[str, Any], resume: bool = False) -> int:
    quiet_libraries(debug=False)
    return run_job(job_from_mapping(mapping, "test"), resume=resume)


def _wait_for_steps(run: Path, launch: int, steps: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        folders = dict(launches_of(run))
        if launch in folders and any(len(file.rows) >= steps for file in read_launch(folders[launch])):
            return
        time.sleep(0.01)
    raise AssertionError(f"launch {launch} does not make {steps} steps")


def test_each_id_once_an_epoch_over_random_kills(tmp_path: Path) -> None:
    """All ranks are killed at random moments, saves included, and continue in other numbers: 2, 1, 3, 2, 3 ranks."""
    run, steps, draw = tmp_path / "run", 240, random.Random(5)
    mapping = _toy(run, steps)
    for number, world in enumerate((2, 1, 3, 2, 3), start=1):
        ranks, _ = start_ranks(_train, world, mapping, number > 1)
        _wait_for_steps(run, number, draw.randint(1, 40))
        time.sleep(draw.uniform(0, 0.03))
        for rank in draw.sample(ranks, world):
            rank.kill()
        for rank in ranks:
            rank.join()
        assert check(run).faults == []
    assert run_ranks(_train, 2, mapping, True) == [0, 0]
    report = check(run)
    assert report.faults == []
    assert report.recorded_to == report.newest.step == steps
    (whole,) = report.epochs
    assert (whole.first, whole.last, whole.used) == (0, steps * BATCH // EPOCH - 1, EPOCH)
    assert [each.head.world for each in report.launches] == [2, 1, 3, 2, 3, 2]
    assert sum(each.recorded_to - each.head.step for each in report.launches) > steps, "no step was done again"


def _killed_at(mapping: dict[str, Any], resume: bool, step: int) -> None:
    """Run on the rank: killed once ``step`` steps are done."""
    append = SampleLedger.after_step

    def after_step(self: SampleLedger, run: Any, report: Any) -> None:
        append(self, run, report)
        if run.progress.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    SampleLedger.after_step = after_step  # type: ignore[method-assign]
    _train(mapping, resume)


def _kill_at(mapping: dict[str, Any], world: int, resume: bool, step: int) -> None:
    ranks, _ = start_ranks(_killed_at, world, mapping, resume, step)
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == -9


def _killed_on_two_then_one_then_three_ranks(mapping: dict[str, Any]) -> Report:
    """Report of the ledger on a run that was killed in its third step on two ranks, and in its fifth on one."""
    _kill_at(mapping, 2, False, 3)
    _kill_at(mapping, 1, True, 5)
    assert run_ranks(_train, 3, mapping, True) == [0, 0, 0]
    report = check(Path(mapping["run"]["dir"]))
    assert report.faults == []
    return report


def test_a_mixture_on_two_then_one_then_three_ranks(tmp_path: Path) -> None:
    """Killed twice, with annealed weights, a source that is left, and boundaries of its epochs inside steps."""
    parts = [
        {"name": name, "files": [str(write_corpus(tmp_path / f"{name}.txt", documents, seed))], **more}
        for seed, (name, documents, more) in enumerate(
            [("a", 14, {"weight": [[0, 1], [1, 4]]}), ("b", 4, {"epochs": 1}), ("c", 20, {"weight": 0.5})]
        )
    ]
    mapping = language_mapping(
        tmp_path, batch={"global": 12, "micro": None}, schedule={"max_steps": 12}, checkpoint={"every": 2, "keep": 9}
    )
    mapping["data"] = {**mapping["data"], "files": [], "mixture": parts}
    report = _killed_on_two_then_one_then_three_ranks(mapping)
    used = {name: 0 for name in "abc"}
    for each in report.epochs:
        used[each.source] += (each.last - each.first + 1) * each.used
    assert sum(used.values()) == 12 * 12
    (b,) = {each.ids for each in report.epochs if each.source == "b"}
    assert used["b"] == b


def test_language_on_two_then_one_then_three_ranks(tmp_path: Path) -> None:
    """Killed twice, within the ramp of the batch and behind it, with an epoch boundary inside a step; the repeated
    steps have the same tokens and noise, and some ranks one sample more than others."""
    write_corpus(tmp_path / "text.txt", documents=14)
    batch = {"global": 12, "micro": None, "ramp": [[200, 5], [600, 7]]}
    mapping = language_mapping(tmp_path, batch=batch, schedule={"max_steps": 9}, checkpoint={"every": 2, "keep": 9})
    run = tmp_path / "run"
    report = _killed_on_two_then_one_then_three_ranks(mapping)
    launches = [(each.head.world, each.head.step, each.recorded_to, each.kept) for each in report.launches]
    assert launches == [(2, 0, 3, 2), (1, 2, 5, 2), (3, 4, 9, 5)]
    ids = report.epochs[0].ids
    assert (ids - 24) % 12, "an epoch ends inside a step"
    assert report.epochs[0].used == ids
    assert sum((each.last - each.first + 1) * each.used for each in report.epochs) == 2 * 5 + 2 * 7 + 5 * 12
    sizes = [file.stat().st_size for file in (run / "ledger").glob("*/*.ledger")]
    assert max(sizes) < 600 + 20 * 9


def test_other_noise_in_a_repeated_step_is_found(tmp_path: Path) -> None:
    """Another version of the program may corrupt otherwise: the ids are right then, the contents are not."""
    mapping = language_mapping(tmp_path, checkpoint={"every": 2})
    _kill_at(mapping, 2, False, 3)
    assert run_ranks(_with_other_noise, 1, mapping) == [0]
    (fault,) = check(tmp_path / "run").faults
    assert (fault.kind, fault.step) == ("contents", 3)


def _with_other_noise(mapping: dict[str, Any]) -> int:
    real: Any = batches.generator_for
    batches.generator_for = lambda stream, *key: real(f"{stream}!", *key)  # type: ignore[attr-defined]
    return _train(mapping, True)


def _fed_twice(mapping: dict[str, Any], sample: int, instead: int) -> int:
    """A loader that reads one sample in the place of another."""
    call = LanguageAssembler.__call__

    def wrong(self: LanguageAssembler, samples: Any, rate: float | None = None) -> Any:
        samples = samples.copy()
        samples[samples == sample] = instead
        return call(self, samples, rate)

    LanguageAssembler.__call__ = wrong  # type: ignore[method-assign]
    return _train(mapping)


def test_what_the_model_was_really_fed_counts(tmp_path: Path) -> None:
    mapping = language_mapping(tmp_path, checkpoint={"every": 2, "keep": 9})
    assert run_ranks(_fed_twice, 2, mapping, 21, 4) == [0, 0]  # in steps of 8 samples
    (fault,) = check(tmp_path / "run").faults
    task: Any = task_class("capt_language")(job_from_mapping(mapping, "test"), tmp_path / "run")
    assert isinstance(task, RecordedTask)
    twice, never = (int(task.assembler("train")(np.array([n])).ids[0]) for n in (4, 21))
    assert (fault.kind, fault.step, fault.rank, fault.id) == ("ids", 3, 1, twice)
    assert f"in the place of id {never}:" in fault.text
    assert "--checkpoint step-00000002" in fault.remedy


@pytest.mark.family
def test_vision_language_on_two_ranks_then_one(tmp_path: Path) -> None:
    batch = {"global": 8, "micro": None}
    mapping = vision_language_mapping(tmp_path, batch=batch, checkpoint={"every": 2}, schedule={"max_steps": 6})
    _kill_at(mapping, 2, False, 3)
    assert run_ranks(_train, 1, mapping, True) == [0]
    report = check(tmp_path / "run")
    assert report.faults == []
    assert [each.kept for each in report.launches] == [2, 4]


def _on_a_full_disk(mapping: dict[str, Any], full: range) -> tuple[int, list[tuple[str, int]]]:
    """While the disk is full no row can be written; when which file was made durable, and which saves were begun."""
    events: list[tuple[str, int]] = []
    step, flush, sync, after = 0, GrowingFile.flush, GrowingFile.sync, SampleLedger.after_step
    begin_save: Any = checkpointer.begin_save

    def after_step(self: SampleLedger, run: Any, report: Any) -> None:
        nonlocal step
        step = run.progress.step
        after(self, run, report)

    def no_space(self: GrowingFile) -> None:
        if step in full:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        flush(self)

    def noted_sync(self: GrowingFile) -> None:
        sync(self)
        events.append((self.path.suffix, step))

    def noted_save(*args: Any, **options: Any) -> Any:
        events.append(("checkpoint", step))
        return begin_save(*args, **options)

    SampleLedger.after_step = after_step  # type: ignore[method-assign]
    GrowingFile.flush, GrowingFile.sync = no_space, noted_sync  # type: ignore[method-assign]
    checkpointer.begin_save = noted_save
    return _train(mapping), events


def test_a_full_disk_costs_checkpoints_and_no_row(tmp_path: Path) -> None:
    """Ledger and metrics are durable before a checkpoint is begun, and none is begun without them."""
    mapping = _toy(tmp_path / "run", 12)
    mapping["run"]["log_every"] = 1
    for rank, (code, events) in enumerate(run_ranks(_on_a_full_disk, 2, mapping, range(5, 8))):
        assert code == 0
        assert [step for what, step in events if what == "checkpoint"] == [3, 9, 12]
        durable = {".ledger", ".jsonl"} if rank == 0 else {".ledger"}
        for place, (what, step) in enumerate(events):
            if what == "checkpoint":
                assert {each for each, at in events[:place] if at == step} == durable
    report = check(tmp_path / "run")
    assert report.faults == []
    assert report.recorded_to == 12
    assert [*losses(tmp_path / "run")] == list(range(1, 13))
    assert "failed_saves" in rows_of(tmp_path / "run")[-1]


@pytest.mark.parametrize("changes", [{"run": {"ledger": False}}, {"task": {"type": "toy_chunks"}}])
def test_without_a_ledger_nothing_is_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    mapping = _toy(tmp_path / "run", 4)
    mapping = {**mapping, **{key: {**mapping[key], **value} for key, value in changes.items()}}
    assert run_ranks(_train, 1, mapping) == [0]
    assert not (tmp_path / "run" / "ledger").exists()
