"""Ranks hear of one another's signals and divergences some steps late, at the same step, and never save a bad state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base import distributed
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.callbacks.agreement import LAG
from capt.pretrain.engine.run import run_job
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.registry import TASKS
from tests.support import run_ranks

TASKS["toy"] = "tests.toy"
_STEPS = 12
_CASES: dict[str, dict[str, Any]] = {
    "signal": {"fault": {"kind": "term", "step": 4, "rank": 1}, "checkpoint": {"every": 0}},
    "late signal": {"fault": {"kind": "term", "step": _STEPS - 1, "rank": 1}, "checkpoint": {"every": 0}},
    "divergence": {"fault": {"kind": "nan_gradient", "step": 4, "rank": 1}, "checkpoint": {"every": 0}},
    "divergence before a save": {"fault": {"kind": "nan", "step": 4, "rank": 1}, "checkpoint": {"every": 5}},
    "divergence before a validation": {"fault": {"kind": "nan", "step": 4, "rank": 1}, "validate": {"every": 5}},
}


def _run_all(folder: Path) -> dict[str, int | str]:
    quiet_libraries(debug=False)
    outcomes: dict[str, int | str] = {}
    for name, changes in _CASES.items():
        mapping = {
            "task": {"type": "toy"},
            "run": {"dir": str(folder / name), "log_every": 1, "tensorboard": False},
            "batch": {"global": 8, "micro": 2},
            "schedule": {"max_steps": _STEPS},
            "validate": {"every": 0},
            **changes,
        }
        try:
            outcomes[name] = run_job(job_from_mapping(mapping, "test"))
        except RuntimeError as error:
            outcomes[name] = str(error)
        distributed.barrier()
    return outcomes


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, int | str]]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(_run_all, 2, folder)


def _status(run_dir: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    return status


def test_a_signal_stops_all_ranks_at_one_step_soon(runs: Any) -> None:
    folder, outcomes = runs
    assert [outcome["signal"] for outcome in outcomes] == [75, 75]
    assert _status(folder / "signal")["step"] == 4 + LAG
    assert [path.name for path in checkpoints_of(folder / "signal")] == [f"step-{4 + LAG:08}"]


def test_a_signal_in_the_last_steps_stops_before_the_end(runs: Any) -> None:
    folder, outcomes = runs
    assert [outcome["late signal"] for outcome in outcomes] == [75, 75]
    assert _status(folder / "late signal")["step"] == _STEPS - 1


@pytest.mark.parametrize("case", [case for case in _CASES if case.startswith("divergence")])
def test_a_divergence_is_named_by_its_step_and_never_saved(runs: Any, case: str) -> None:
    folder, outcomes = runs
    assert all("at step 4; resume from the last checkpoint" in outcome[case] for outcome in outcomes)
    assert "is not finite on another rank" in outcomes[0][case] or case == "divergence"
    assert "is nan" in outcomes[1][case]
    assert not checkpoints_of(folder / case)
    assert _status(folder / case)["state"] == "failed"


def test_metrics_are_json_to_the_last_line(runs: Any) -> None:
    folder, _ = runs

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    for case in _CASES:
        rows = [
            json.loads(line, parse_constant=refuse)
            for line in (folder / case / "metrics.jsonl").read_text().splitlines()
        ]
        assert not any("split" in row for row in rows), "a diverged state was validated"
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        nulls = [row["step"] for row in rows if None in row.values()]
        assert bool(nulls) == case.startswith("divergence"), case


def _late(delay: float) -> tuple[list[str], float]:
    """Rank 1 comes late; what rank 0 says meanwhile, and whether a rank that comes first waits for it."""
    import logging
    import time

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    distributed.logger.addHandler(handler)
    distributed._TELL = 0.5
    begin = time.monotonic()
    with distributed.synchronize_errors(patient=True):
        time.sleep(delay * distributed.rank())
    return said, time.monotonic() - begin


def test_it_is_said_for_how_many_ranks_a_job_waits() -> None:
    (said, waited), (nothing, _) = run_ranks(_late, 2, 3.0)
    assert waited >= 3.0
    assert said
    assert all(line.startswith("waiting for 1 of 2 ranks since ") for line in said)
    assert not nothing
