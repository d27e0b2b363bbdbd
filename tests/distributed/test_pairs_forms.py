"""All kinds of pairs and losses in one job: two ranks under every ZeRO stage are one process; a killed run is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.pairs.losses import LOSSES
from capt.pretrain.reliability.ledger.check import check
from tests.pairs import every_form, pairs_mapping
from tests.runs import rows_of
from tests.support import run_ranks, start_ranks
from tests.toy_loss import MARGIN


def _run(mapping: dict[str, Any], resume: bool = False, kill_at: int = 0) -> int:
    """The exit code of a job; with ``kill_at`` the process ends itself in the middle of that step."""
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.engine.run import run_job
    from capt.pretrain.pairs.task import PairTask

    quiet_libraries(debug=False)
    step = PairTask.step

    def killed(self: PairTask, engines: Any, batch: Any, progress: Any) -> Any:
        if progress.step + 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, engines, batch, progress)

    PairTask.step = killed  # type: ignore[method-assign]
    try:
        return run_job(job_from_mapping(mapping, "test"), resume=resume)
    finally:
        PairTask.step = step  # type: ignore[method-assign]


def _run_each(mappings: list[dict[str, Any]]) -> list[int]:
    return [_run(mapping) for mapping in mappings]


def _rows(run: Path) -> list[dict[str, Any]]:
    kept = ("step", "split", "loss", "grad_norm", "spearman", "accuracy/mlm", "tokens", "recall/to_document/8")
    return [{key: row[key] for key in row if key in kept or key.startswith("loss/")} for row in rows_of(run)]


def _job(folder: Path, run: str, *, mixed: bool, stage: int = 0, world: int = 1, **changes: Any) -> dict[str, Any]:
    return pairs_mapping(
        folder, **{
            **every_form(folder, mixed=mixed), "schedule": {"max_steps": 4}, "validate": {"every": 2},
            "batch": {"global": 8, "micro": 4 // world}, "engine": {"zero_stage": stage},
            "optimizer": {"lr": 1e-3, "clip": 0.0}, "run": {"dir": str(folder / run)}, **changes,
        },
    )  # fmt: skip


@pytest.mark.parametrize("mixed", [False, True])
def test_two_ranks_under_every_stage_are_one_process(tmp_path: Path, mixed: bool) -> None:
    assert run_ranks(_run, 1, _job(tmp_path, "one", mixed=mixed)) == [0]
    stages = (0, 1, 2, 3) if mixed else (2,)
    jobs = [_job(tmp_path, f"stage-{stage}", mixed=mixed, stage=stage, world=2) for stage in stages]
    assert run_ranks(_run_each, 2, jobs) == [[0] * len(jobs)] * 2
    expected = _rows(tmp_path / "one")
    seen = {key for row in expected for key in row}
    assert seen >= {"loss/pairs", "loss/cosent", "loss/distillation", "loss/mlm", "spearman", "recall/to_document/8"}
    for stage in stages:
        for ours, theirs in zip(_rows(tmp_path / f"stage-{stage}"), expected, strict=True):
            assert ours.pop("split", None) == theirs.get("split"), stage
            assert ours == pytest.approx({k: v for k, v in theirs.items() if k != "split"}, rel=2e-3, abs=2e-5), stage
        assert not check(tmp_path / f"stage-{stage}").faults


def _run_with_toy(mapping: dict[str, Any]) -> int:
    LOSSES["margin"] = MARGIN
    return _run(mapping)


def test_a_loss_of_another_file_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    rows = []
    for world in (1, 2):
        job = _job(tmp_path, f"toy-{world}", mixed=True, world=world)
        job["data"]["sources"][2] |= {"loss": "margin", "loss_options": {"scale": 0.1}}
        job["distillation"] = {"weight": 0.0}
        assert run_ranks(_run_with_toy, world, job) == [0] * world
        rows.append(_rows(tmp_path / f"toy-{world}"))
    for ours, theirs in zip(*rows, strict=True):
        assert ours.pop("split", None) == theirs.pop("split", None)
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-5)
    assert sum("loss/margin" in row for row in rows[0]) == 4, "in every step"


def test_micro_batches_by_a_budget_of_tokens_leave_the_training_as_it_is(tmp_path: Path) -> None:
    """Losses and gradient norms are those of undivided steps, on 1 and 2 ranks."""
    assert run_ranks(_run, 1, _job(tmp_path, "whole", mixed=False, batch={"global": 8, "micro": 8})) == [0]
    expected = _rows(tmp_path / "whole")
    cases = {1: [0], 2: [2, 3]}
    for world, stages in cases.items():
        batch = {"global": 8, "micro": None, "micro_tokens": 160}
        jobs = [
            _job(tmp_path, f"budget-{world}-{stage}", mixed=False, stage=stage, world=world, batch=batch)
            for stage in stages
        ]
        parts = run_ranks(_parts_of_each, world, jobs)
        assert parts == [parts[0]] * world
        assert all(len(set(numbers)) > 1 for numbers in parts[0]), "steps have different numbers of micro-batches"
        for stage in stages:
            rows = _rows(tmp_path / f"budget-{world}-{stage}")
            assert [row.keys() for row in rows] == [row.keys() for row in expected]
            for ours, theirs in zip(rows, expected, strict=True):
                assert ours.pop("split", None) == theirs.get("split")
                assert ours == pytest.approx({k: v for k, v in theirs.items() if k != "split"}, rel=2e-3, abs=2e-5)
            assert not check(tmp_path / f"budget-{world}-{stage}").faults


def _parts_of_each(mappings: list[dict[str, Any]]) -> list[list[int]]:
    """The number of micro-batches of every step of each job, which it runs."""
    from capt.pretrain.pairs.task import PairTask

    step, found = PairTask.step, []

    def counted(self: PairTask, engines: Any, batch: Any, progress: Any) -> Any:
        numbers.append(len(batch))
        return step(self, engines, batch, progress)

    for mapping in mappings:
        numbers: list[int] = []
        PairTask.step = counted  # type: ignore[method-assign]
        try:
            assert _run(mapping) == 0
        finally:
            PairTask.step = step  # type: ignore[method-assign]
        found.append(numbers)
    return found


@pytest.mark.parametrize("mixed", [False, True])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, mixed: bool) -> None:
    changes: dict[str, Any] = {"model": {"dropout": 0.1}, "checkpoint": {"every": 2}, "schedule": {"max_steps": 6}}
    whole, job = (_job(tmp_path, name, mixed=mixed, **changes) for name in ("whole", "run"))
    assert run_ranks(_run, 1, whole) == [0]
    (process,), _ = start_ranks(_run, 1, job, False, 4)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert run_ranks(_run, 1, job, True) == [0]
    assert _rows(tmp_path / "run") == _rows(tmp_path / "whole")
    report = check(tmp_path / "run")
    assert not report.faults
    assert sum(epochs.used * (1 + epochs.last - epochs.first) for epochs in report.epochs) == 6 * 8
