"""A rank whose parameters or counters are no longer those of the others ends the job, and is named."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base import distributed
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.run import run_job
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.registry import TASKS
from capt.pretrain.reliability.replicas import Held, describe_difference
from tests.support import run_ranks

TASKS["toy"] = "tests.toy"
_FLIP = {"kind": "flip", "step": 7, "rank": 1}
_CASES: dict[str, dict[str, Any]] = {
    "sound": {"engine": {"zero_stage": 0}},
    "sound, ZeRO 2": {"engine": {"zero_stage": 2}},
    "sound, ZeRO 3": {"engine": {"zero_stage": 3}},
    "sound, bf16": {"engine": {"zero_stage": 1, "precision": "bf16"}},
    "sound, sparse": {"engine": {"zero_stage": 0}, "table": "adagrad"},
    "every 4 steps": {"fault": _FLIP, "guard": {"checksum": 4}},
    "between logged steps": {"fault": _FLIP, "guard": {"checksum": 1}, "run": {"log_every": 10}},
    "before a save": {"fault": _FLIP, "guard": {"checksum": 1000}, "checkpoint": {"every": 3}},
    **{
        f"{kind}, ZeRO {stage}": {
            "fault": {**_FLIP, "kind": kind},
            "guard": {"checksum": 1},
            "engine": {"zero_stage": stage},
            "checkpoint": {"every": 3},
        }
        for kind in ("flip", "flip_master")
        for stage in range(4)
    },
    "off": {"fault": _FLIP, "guard": {"checksum": 0}},
}


def _run_all(folder: Path) -> dict[str, int | str]:
    quiet_libraries(debug=False)
    outcomes: dict[str, int | str] = {}
    for name, changes in _CASES.items():
        mapping = {
            "task": {"type": "toy"},
            "batch": {"global": 8, "micro": 2},
            "schedule": {"max_steps": 12},
            "validate": {"every": 0},
            "guard": {"checksum": 2},
            "engine": {"zero_stage": 0},
            "checkpoint": {"every": 0},
            **changes,
            "run": {"dir": str(folder / name), "log_every": 1, "tensorboard": False, **changes.get("run", {})},
        }
        gc.freeze()  # a run thaws what the server had frozen, and collects all of it in its first step
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


def test_ranks_that_are_alike_train_to_the_end(runs: Any) -> None:
    for outcome in runs[1]:
        assert {name: outcome[name] for name in _CASES if name.startswith("sound")} == {
            name: 0 for name in _CASES if name.startswith("sound")
        }


@pytest.mark.parametrize(("case", "step"), [("every 4 steps", 8), ("between logged steps", 7), ("before a save", 9)])
def test_a_flipped_bit_is_found_at_the_next_look(runs: Any, case: str, step: int) -> None:
    folder, outcomes = runs
    assert outcomes[0][case] == outcomes[1][case]
    text = str(outcomes[0][case])
    when = f"after step {step}" if case == "before a save" else f"in step {step}, before its update,"
    assert text.startswith(f"{when} rank 1 (")
    assert "differs in model.first.weight and " in text or "differs in model.norm.weight" in text
    assert "no value is that of most ranks" in text
    status = json.loads((folder / case / "status.json").read_text())
    assert (status["state"], status.get("final", False)) == ("failed", False), "the supervisor may start it again"
    assert [int(path.name[5:]) for path in checkpoints_of(folder / case)] == [3, 6][: 2 * (case == "before a save")]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["flip", "flip_master"])
def test_a_flipped_bit_is_found_before_the_update_whatever_is_sharded(runs: Any, kind: str, stage: int) -> None:
    """An update of ZeRO 1 to 3 makes all copies of a parameter equal, with the gradient of the wrong one in them."""
    folder, outcomes = runs
    case = f"{kind}, ZeRO {stage}"
    assert outcomes[0][case] == outcomes[1][case]
    text = str(outcomes[0][case])
    assert text.startswith("in step 7, before its update, rank 1 (")
    own = kind == "flip_master" and stage > 0
    assert ("its master weights are not the weights that it uses" in text) == own
    assert [int(path.name[5:]) for path in checkpoints_of(folder / case)] == [3, 6]


def test_without_checksums_nobody_looks(runs: Any) -> None:
    assert [outcome["off"] for outcome in runs[1]] == [0, 0]


def _held(host: str, **values: Any) -> Held:
    return Held(host, {"model.a": 1, "model.b": 2, "step": 5} | values)


def test_the_ranks_that_are_not_as_most_are_named_with_host_and_first_tensor() -> None:
    text = describe_difference(
        [_held("n0"), _held("n1", **{"model.b": 3}), _held("n2"), _held("n3", step=4), _held("n4")]
    )
    assert text == "rank 1 (n1) differs in model.b; rank 3 (n3) differs in step (4, not 5): not as all others"
    assert describe_difference([_held("n0", **{"model.a": 9, "model.b": 9}), _held("n1"), _held("n2")]).startswith(
        "rank 0 (n0) differs in model.a and 1 more: not as all others"
    )


def test_of_two_ranks_nobody_knows_which_is_right_and_many_are_counted() -> None:
    text = describe_difference([_held("n0"), _held("n1", step=4)])
    assert text == "rank 1 (n1) differs in step (4, not 5): not as rank 0 (n0), and no value is that of most ranks"
    text = describe_difference([_held("n0")] * 8 + [_held("n1", step=i) for i in range(10, 16)])
    assert text.endswith("; 2 further ranks: 12, 13: not as all others")


def test_a_rank_whose_master_weights_differ_is_wrong_whatever_the_others_hold() -> None:
    text = describe_difference([_held("n0")._replace(damaged=["model.a", "model.b"]), _held("n1")])
    assert text == "rank 0 (n0) differs in model.a and 1 more: its master weights are not the weights that it uses"
