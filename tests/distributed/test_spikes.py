"""A spike of the loss: said, skipped before the update, gone back for, or the end; and the ledger knows of it."""

from __future__ import annotations

import gc
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capt.launcher.requeue import again
from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.callbacks import default_callbacks
from capt.pretrain.engine.checkpoint import read_metadata
from capt.pretrain.engine.checkpoint.fragments import fragments, optimizer_step_count
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.loop import Callback, Run, train
from capt.pretrain.engine.run import run_job
from capt.pretrain.engine.run_folder import read_status
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.engine.task import Progress
from capt.pretrain.registry import TASKS, task_class
from capt.pretrain.reliability import spikes as spikes
from capt.pretrain.reliability.ledger.check import Report, as_json, as_text, check
from capt.pretrain.reliability.rollbacks import read_rollbacks, resume_after
from capt.pretrain.reliability.spikes import Spike, SpikeWatch
from tests import runs
from tests.language import language_mapping
from tests.support import emulate_fp16, run_ranks

TASKS["toy"] = "tests.toy"
TASKS["toy_chunks"] = "tests.toy_chunks"
STEPS, BATCH = 48, 8
BAD = 40
"""The spike is in the samples of this step."""
SAMPLE = (BAD - 1) * BATCH + 3
SOON, FEW = 18, 24
"""The bad step and the number of steps, in runs for which a past of ``PAST`` steps is enough."""
PAST = 12


def _mapping(folder: Path, **changes: Any) -> dict[str, Any]:
    run = {"dir": str(folder), "log_every": 1, "tensorboard": False, "threads": 1, **changes.pop("run", {})}
    return {
        "task": {"type": "toy"},
        "batch": {"global": BATCH, "micro": 2},
        "schedule": {"max_steps": STEPS},
        "optimizer": {"lr": 1e-3},
        "validate": {"every": 0},
        "checkpoint": {"every": 12, "keep": 9},
        "bad_samples": [SAMPLE],
        **changes,
        "run": run,
    }


class _States(Callback):
    """Weights, moments and counts after each step, and what the progress line remarks."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.counts: list[tuple[int, Any]] = []
        self.remarks: list[str] = []

    def after_step(self, run: Run, report: Any) -> None:
        (engine,) = run.engines.values()
        own = {f"{each.kind}/{each.name}@{each.start}": each.view.clone() for each in fragments(engine)}
        self.states.append(own)
        scaler = engine.loss_scale_state()
        self.counts.append((optimizer_step_count(engine), scaler.get("cur_scale", scaler.get("scale"))))
        self.remarks.append(run.remarks["spike"])


def _changes(mapping: dict[str, Any]) -> tuple[list[bool], list[tuple[int, Any]], list[str]]:
    """Changes on this rank by each step from the second on; counts; remarks."""
    quiet_libraries(debug=False)
    spikes.ENOUGH = PAST
    if mapping["engine"].get("precision") == "fp16":
        emulate_fp16()
    job = job_from_mapping(mapping, "test")
    task = task_class("toy")(job, job.run.dir)
    job.run.dir.mkdir(parents=True, exist_ok=True)
    engines = build_engines(task.build_modules(), job, task.optimizers())
    seen = _States()
    train(Run(job, job.run.dir, task, engines, Progress()), [*default_callbacks(job), seen])
    pairs = zip(seen.states, seen.states[1:], strict=False)
    changed = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in pairs]
    return changed, seen.counts, seen.remarks


_ENGINES: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "bf16": {"zero_stage": 1, "precision": "bf16"},
    "fp16 at ZeRO 0": {"zero_stage": 0, "precision": "fp16"},
    "fp16 at ZeRO 1": {"zero_stage": 1, "precision": "fp16"},
    "fp16 at ZeRO 3": {"zero_stage": 3, "precision": "fp16"},
    "an overflow": {"zero_stage": 0, "precision": "fp16"},
    "offloaded": {"zero_stage": 2, "offload_optimizer": True},
}


def _skip(folder: Path, world: int) -> dict[str, Any]:
    names = list(_ENGINES) if world > 1 else ["ZeRO 0", "ZeRO 1"]
    found = {}
    for name in names:
        # 100 times as large a gradient overflows in fp16, which the scaler answers by itself
        badness = {"badness": 25.0} if name.startswith("fp16") else {}
        few = {"schedule": {"max_steps": FEW}, "bad_samples": [(SOON - 1) * BATCH + 3], "checkpoint": {"every": 0}}
        mapping = _mapping(folder / name, engine=_ENGINES[name], guard={"spike": "skip"}, **few, **badness)
        gc.freeze()
        found[name] = _changes(mapping)
        distributed.barrier()
    return found


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("skipped")
    return {world: run_ranks(_skip, world, folder / str(world), world, timeout=300) for world in (1, 2)}


def test_an_overflow_is_the_scalers_and_its_loss_is_not_counted_into_the_next_step(skipped: Any) -> None:
    changed, counts, remarks = skipped[2][0]["an overflow"]
    assert counts[SOON - 1][1] == counts[SOON - 2][1] / 2
    assert not changed[SOON - 2]
    assert changed[SOON - 1]
    assert remarks[-1] == ""


@pytest.mark.parametrize(
    ("world", "name"), [(1, "ZeRO 0"), (1, "ZeRO 1"), *((2, name) for name in _ENGINES if name != "an overflow")]
)
def test_a_skipped_step_changes_no_bit_and_the_others_go_on(skipped: Any, world: int, name: str) -> None:
    for rank in skipped[world]:
        changed, counts, remarks = rank[name]
        first = 0 if "fp16" not in name else changed.index(True)  # an overflow may come first
        assert [step + 2 for step in range(first, FEW - 1) if not changed[step]] == [SOON]
        applied, scales = zip(*counts, strict=True)
        assert applied[SOON - 1] == applied[SOON - 2] == applied[SOON] - 1
        assert scales[SOON - 1] == scales[SOON - 2], "the loss scale is not lowered"
        assert remarks[SOON - 2] == ""
        assert remarks[SOON - 1] == remarks[-1] == f"SPIKE at step {SOON} (1 so far)"


def _run(mapping: dict[str, Any], resume: bool = False) -> int | str:
    quiet_libraries(debug=False)
    logging.getLogger("capt.pretrain").setLevel(logging.INFO)
    try:
        return run_job(job_from_mapping(mapping, "test"), resume=resume)
    except (RuntimeError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"


def _run_all(mappings: list[dict[str, Any]], past: int = spikes.ENOUGH) -> list[int | str]:
    outcomes, spikes.ENOUGH = [], past
    for mapping in mappings:
        gc.freeze()  # a run thaws what the server had frozen, and collects all of it in its first step
        outcomes.append(_run(mapping))
        distributed.barrier()
    return outcomes


def test_gradients_of_a_skipped_step_do_not_reach_the_next_one(tmp_path: Path) -> None:
    """With SGD and no momentum, from a step behind: the run is that of one which never saw the samples."""
    plain: dict[str, Any] = {"optimizer": {"type": "sgd", "momentum": 0.0, "lr": 1e-3}, "checkpoint": {"every": 0}}
    plain["bad_samples"] = [(SOON - 1) * BATCH + 3]
    plain["schedule"] = {"type": "constant", "max_steps": FEW}
    begin = (SOON - 1) * BATCH
    mappings = []
    for stage in (0, 1, 2, 3):
        engine = {"zero_stage": stage}
        mappings += [
            _mapping(tmp_path / f"skip-{stage}", guard={"spike": "skip"}, engine=engine, **plain),
            _mapping(tmp_path / f"never-{stage}", avoid=[begin, begin + BATCH], engine=engine, **plain),
        ]
    assert run_ranks(_run_all, 2, mappings, PAST, timeout=300) == [[0] * 8] * 2
    for stage in (0, 1, 2, 3):
        skip, never = runs.losses(tmp_path / f"skip-{stage}"), runs.losses(tmp_path / f"never-{stage}")
        assert skip[SOON] > 10 * never[SOON]
        assert [skip[step + 1] for step in range(SOON, FEW)] == [never[step] for step in range(SOON, FEW)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Runs on two ranks, by the name of their folder."""
    folder = tmp_path_factory.mktemp("runs")
    several = [(step - 1) * BATCH for step in (36, 39, 42, 45)]
    cases: dict[str, dict[str, Any]] = {
        "warn": {},
        "off": {"guard": {"spike": "off"}},
        "stop": {"guard": {"spike": "stop"}},
        "healthy": {"guard": {"spike": "skip"}, "bad_samples": []},
        "too many": {"guard": {"spike": "skip", "spikes": 2}, "bad_samples": several},
        "no rollback": {"guard": {"spike": "rollback", "spikes": 0}},
        "two modules": {"guard": {"spike": "skip"}, "table": "adagrad", "engine": {"zero_stage": 0}},
        "chunks": {"guard": {"spike": "rollback"}, "task": {"type": "toy_chunks"}},
        "no band": {"guard": {"spike": "stop", "spike_threshold": 1e6}},
    }
    mappings = []
    for name, changes in cases.items():
        needs = {} if name in ("stop", "too many") else {"checkpoint": {"every": 0}}
        mapping = _mapping(folder / name, **needs, **changes)
        if name == "chunks":
            del mapping["bad_samples"]
        mappings.append(mapping)
    (results, others) = run_ranks(_run_all, 2, mappings, timeout=300)
    assert results == others
    return folder, dict(zip(cases, results, strict=True))


def test_a_warning_changes_no_number(outcomes: Any) -> None:
    folder, codes = outcomes
    assert codes["warn"] == codes["off"] == codes["no band"] == 0
    assert runs.losses(folder / "warn") == runs.losses(folder / "off") == runs.losses(folder / "no band")
    log = (folder / "warn/log/rank-0.log").read_text()
    (line,) = [line for line in log.splitlines() if "is a spike" in line]
    assert f"at step {BAD} is a spike: its median was" in line
    assert "guard.spike=skip" in line
    assert "is a spike" not in (folder / "off/log/rank-0.log").read_text()
    assert f"SPIKE at step {BAD} (1 so far)" in next(row for row in log.splitlines() if f"step {STEPS}/" in row)


def test_no_spike_no_change(outcomes: Any) -> None:
    folder, codes = outcomes
    assert codes["healthy"] == 0
    assert "spike" not in (folder / "healthy/log/rank-0.log").read_text().lower()
    assert check(folder / "healthy").left_out == 0


def test_stop_saves_nothing_behind_the_spike(outcomes: Any) -> None:
    folder, codes = outcomes
    assert codes["stop"].startswith(
        f"SpikeError: loss {runs.losses(folder / 'stop')[BAD]:.4g} at step {BAD} is a spike"
    )
    assert [path.name for path in checkpoints_of(folder / "stop")][-1] == "step-00000036"
    status = read_status(folder / "stop")
    assert status is not None
    assert status.final


def test_more_spikes_than_allowed_end_the_run(outcomes: Any) -> None:
    folder, codes = outcomes
    assert "at step 42 is a spike" in codes["too many"]
    assert "the 3th: more than guard.spikes=2" in codes["too many"]
    assert "guard.spikes=0" in codes["no rollback"]
    assert codes["no rollback"].startswith("SpikeError")
    assert read_rollbacks(folder / "no rollback") == []


def test_what_a_task_cannot_do_is_refused(outcomes: Any) -> None:
    _, codes = outcomes
    assert codes["two modules"].startswith("ConfigError: guard.spike: skip leaves out the update of one module")
    assert codes["chunks"].startswith("ConfigError: guard.spike: rollback leaves out samples")


def test_skipped_samples_are_in_the_ledger(outcomes: Any, tmp_path: Path) -> None:
    report = _sound(outcomes[0] / "too many")
    assert report.left_out == 2 * BATCH
    assert "16 samples of 2 steps changed nothing (launch 1, 36, 39)" in as_text(report)
    mapping = _mapping(tmp_path / "run", guard={"spike": "skip"})
    assert run_ranks(_run, 2, mapping) == [0, 0]
    report = _sound(tmp_path / "run")
    assert report.left_out == BATCH
    assert f"8 samples of 1 step changed nothing (launch 1, {BAD})" in as_text(report)
    assert as_text(report).endswith("each id once an epoch, but for 8 samples left out by guard.spike")


def _sound(run: Path) -> Report:
    report = check(run)
    assert report.faults == []
    return report


@pytest.mark.parametrize("world", [1, 2])
def test_a_rollback_ends_as_if_the_samples_had_never_been(tmp_path: Path, world: int) -> None:
    """From step 40 to the checkpoint of step 36; it ends once more before the next checkpoint; then to the end."""
    mapping = _mapping(tmp_path / "run", guard={"spike": "rollback"}, engine={"zero_stage": 1})
    run, begin, end = tmp_path / "run", 36 * BATCH, BAD * BATCH
    outcome = run_ranks(_run, world, mapping)
    assert all(each.startswith("RolledBackError: loss") for each in outcome)
    status = read_status(run)
    assert status is not None
    assert not status.final
    assert again(run, 1, 3, "job"), "it is started again"
    diverges = {**mapping, "fault": {"kind": "nan", "step": 39}}
    assert "at step 39; resume from the last checkpoint" in run_ranks(_run, world, diverges, True)[0]
    assert run_ranks(_run, world, mapping, True) == [0] * world
    (rollback,) = read_rollbacks(run)
    assert (rollback.step, rollback.start, rollback.end) == (BAD, begin, end)
    never = _mapping(tmp_path / "never", avoid=[begin, end], engine={"zero_stage": 1})
    assert run_ranks(_run, world, never) == [0] * world
    assert runs.losses(run) == runs.losses(tmp_path / "never")
    report = _sound(run)
    assert report.left_out == as_json(report)["left_out"] == end - begin
    assert f"samples {begin} to {end - 1} are left out before step 37" in as_text(report)
    for path in (run / "ledger").glob("launch-*/*.ledger"):  # without that word the same history is wrong
        path.write_bytes(path.read_bytes().replace(b'"left_out":32', b'"left_out":0', 1))
    assert [fault.kind for fault in check(run).faults] == ["position"]


def test_two_rollbacks_to_one_checkpoint_and_no_third(tmp_path: Path) -> None:
    samples = [(step - 1) * BATCH for step in (38, 40, 43)]
    mapping = _mapping(tmp_path, guard={"spike": "rollback", "spikes": 2}, bad_samples=samples)
    assert "at step 38" in str(run_ranks(_run, 1, mapping)[0])
    assert again(tmp_path, 1, 3, "job")
    assert "at step 38" in str(run_ranks(_run, 1, mapping, True)[0]), "two steps later in the samples"
    assert again(tmp_path, 1, 3, "job"), "the same step is no loop: other samples follow"
    (last,) = run_ranks(_run, 1, mapping, True)
    assert str(last).startswith("SpikeError")
    assert "guard.spikes=2" in str(last)
    assert [(each.start, each.end) for each in read_rollbacks(tmp_path)] == [(288, 304), (288, 320)]
    assert json.loads((tmp_path / "restarts.json").read_text())["failures"] == 0
    _sound(tmp_path)


def test_a_checkpoint_that_is_named_gives_the_rollback_up(tmp_path: Path) -> None:
    assert "RolledBackError" in str(run_ranks(_run, 1, _mapping(tmp_path, guard={"spike": "rollback"}))[0])
    assert resume_after(tmp_path, 6 * BATCH, newest=False) == 0
    assert resume_after(tmp_path, 36 * BATCH, newest=True) == 0


def test_a_resumed_run_skips_the_same_step(tmp_path: Path) -> None:
    """With fewer steps of its own than a judgement needs: the past is in the checkpoint, bit for bit."""
    guard = {"spike": "skip"}
    assert run_ranks(_run, 2, _mapping(tmp_path / "whole", guard=guard)) == [0, 0]
    stopped = _mapping(tmp_path / "parts", guard=guard, schedule={"max_steps": STEPS, "stop_after": 36})
    assert run_ranks(_run, 2, stopped) == [75, 75]
    assert run_ranks(_run, 2, _mapping(tmp_path / "parts", guard=guard), True) == [0, 0]
    assert runs.losses(tmp_path / "whole") == runs.losses(tmp_path / "parts")
    states = [read_metadata(checkpoints_of(tmp_path / name)[-1]).spikes for name in ("whole", "parts")]
    assert states[0] == states[1]
    assert (states[0].count, states[0].last, len(states[0].past["loss"])) == (1, BAD, STEPS)
    assert check(tmp_path / "parts").left_out == BATCH


def test_spikes_that_were_only_warned_of_are_no_skips(tmp_path: Path) -> None:
    """guard.spikes counts what was left out: a run that becomes careful late is not at its end with the next spike."""
    bad = {"bad_samples": [(step - 1) * BATCH for step in (36, 40)]}
    stopped = _mapping(tmp_path, schedule={"max_steps": STEPS, "stop_after": 37}, **bad)
    assert run_ranks(_run, 1, stopped) == [75]
    assert run_ranks(_run, 1, _mapping(tmp_path, guard={"spike": "skip", "spikes": 1}, **bad), True) == [0]
    state = read_metadata(checkpoints_of(tmp_path)[-1]).spikes
    assert (state.count, state.skipped) == (2, 1)
    assert "its update is left out (1 of 1, guard.spikes)" in (tmp_path / "log/rank-0.log").read_text()


@pytest.mark.parametrize("remedy", ["skip", "rollback"])
def test_another_loss_from_a_resume_on_is_no_spike(tmp_path: Path, remedy: str) -> None:
    """Other data, say: a run that went back would find the same loss again and again, until guard.spikes ends it."""
    guard = {"spike": remedy, "spikes": 2}
    stopped = _mapping(tmp_path, guard=guard, bad_samples=[], schedule={"max_steps": STEPS, "stop_after": 36})
    assert run_ranks(_run, 1, stopped) == [75]
    other = _mapping(tmp_path, guard=guard, bad_samples=[*range(36 * BATCH, STEPS * BATCH)])
    assert run_ranks(_run, 1, other, True) == [0]
    state = read_metadata(checkpoints_of(tmp_path)[-1]).spikes
    assert (state.count, len(state.past["loss"])) == (0, STEPS - 36)


def test_the_past_ends_where_a_forward_pass_sees_another_number_of_sequences(tmp_path: Path) -> None:
    stopped = _mapping(tmp_path, bad_samples=[], schedule={"max_steps": STEPS, "stop_after": 36})
    assert run_ranks(_run, 1, stopped) == [75]
    assert run_ranks(_run, 2, _mapping(tmp_path, bad_samples=[], optimizer={"lr": 5e-4}), True) == [0, 0]
    state = read_metadata(checkpoints_of(tmp_path)[-1]).spikes
    assert len(state.past["loss"]) == STEPS - 36
    assert "batch.micro x ranks is 4, it was 2" in (tmp_path / "log/rank-0.log").read_text()


def test_a_language_run_that_is_resumed_as_it_was_keeps_its_past(tmp_path: Path) -> None:
    """Figures from the data, worked out at the start, change no key."""
    stop = {"stop_after": 3, **language_mapping(tmp_path)["schedule"]}
    assert run_ranks(_run, 1, language_mapping(tmp_path, schedule=stop)) == [75]
    assert run_ranks(_run, 1, language_mapping(tmp_path), True) == [0]
    state = read_metadata(checkpoints_of(tmp_path / "run")[-1]).spikes
    assert len(state.past["loss"]) == stop["max_steps"]


def test_the_past_is_alike_with_and_without_resume_where_ranks_hear_late(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path / "whole", bad_samples=[])
    stopped = _mapping(tmp_path / "parts", bad_samples=[], schedule={"max_steps": STEPS, "stop_after": 20})
    assert run_ranks(_run, 2, mapping) == [0, 0]
    assert run_ranks(_run, 2, stopped) == [75, 75]
    assert run_ranks(_run, 2, _mapping(tmp_path / "parts", bad_samples=[]), True) == [0, 0]
    whole, parts = (read_metadata(checkpoints_of(tmp_path / name)[-1]).spikes for name in ("whole", "parts"))
    assert whole == parts
    losses = runs.losses(tmp_path / "whole")
    assert whole.past["loss"] == pytest.approx([losses[step] for step in range(1, STEPS + 1)], rel=1e-6)


def _language(mapping: dict[str, Any], bad: int) -> tuple[dict[int, float], list[bool], list[int], list[int]]:
    """Losses given to the guard of a language run, with a veto at ``bad``; changed steps; rows queued; and the
    steps before which the past is forgotten."""
    quiet_libraries(debug=False)
    told: dict[int, float] = {}

    def look(watch: SpikeWatch, step: int, figures: Any) -> Spike | None:
        told[step] = figures["loss"]
        return Spike(step, "loss", figures["loss"], 0.0, 0.0) if step == bad else None

    forgotten: list[int] = []
    SpikeWatch.look = look  # type: ignore[assignment]
    SpikeWatch.forget = lambda watch: forgotten.append(len(told) + 1)  # type: ignore[assignment]
    job = job_from_mapping(mapping, "test")
    task: Any = task_class("capt_language")(job, job.run.dir)
    job.run.dir.mkdir(parents=True, exist_ok=True)
    engines = build_engines(task.build_modules(), job, task.optimizers())
    seen = _States()
    pushed: list[int] = []
    seen.before_step = lambda run: pushed.append(task.contrast.queue.pushed)  # type: ignore[method-assign]
    train(Run(job, job.run.dir, task, engines, Progress()), [*default_callbacks(job), seen])
    pairs = zip(seen.states, seen.states[1:], strict=False)
    return told, [any(not torch.equal(a[name], b[name]) for name in a) for a, b in pairs], pushed, forgotten


@pytest.mark.parametrize("contrast", [{"cached": True}, {"cached": False, "queue_start": 3}, {"momentum": 0.9}])
def test_the_language_task_tells_the_guard_its_loss(tmp_path: Path, contrast: dict[str, Any]) -> None:
    """The mean over two ranks and two micro-batches each, as in the metrics; a step left out changes no bit, and its
    rows are in the queue."""
    mapping = language_mapping(tmp_path, contrast={"queue": 41, **contrast}, guard={"spike": "skip"})
    for told, changed, pushed, forgotten in run_ranks(_language, 2, mapping, 4):
        losses = runs.losses(tmp_path / "run")
        assert forgotten == [contrast.get("queue_start", 0) + 1], "the loss is another one once the queue joins it"
        assert told == pytest.approx(losses, rel=1e-6)
        assert changed == [True, True, False, True, True]
        assert [b - a for a, b in itertools.pairwise(pushed)] == [pushed[1]] * 5
