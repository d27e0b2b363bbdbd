"""A task that does many updates between two looks of the loop leaves what one leaves that does one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.checkpoint import read_manifest, read_metadata
from capt.pretrain.engine.run import run_job
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.registry import TASKS
from tests.runs import rows_of
from tests.support import run_ranks

TASKS |= {"toy": "tests.toy", "toy_chunks": "tests.toy_chunks"}
_TIMES = ("samples_per_second", "tokens_per_second", "seconds_per_step", "own_time_ratio")


def _mapping(type_: str, run_dir: Path, **changes: Any) -> dict[str, Any]:
    schedule = {"max_steps": 23, "warmup_steps": 7, "type": "cosine", **changes.pop("schedule", {})}
    return {
        "task": {"type": type_},
        "run": {"dir": str(run_dir), "log_every": 4, "tensorboard": False},
        "batch": {"global": 8, "micro": 4},
        "schedule": schedule,
        "optimizer": {"lr": 1e-2, "clip": 0.5},
        "validate": {"every": 6},
        "checkpoint": {"every": 5, "keep": 9},
        **changes,
    }


def _codes(*runs: tuple[dict[str, Any], bool]) -> list[int]:
    quiet_libraries(debug=False)
    return [run_job(job_from_mapping(mapping, "test"), resume=resume) for mapping, resume in runs]


def _left(run_dir: Path) -> tuple[list[Any], dict[str, Any]]:
    """Rows of metrics without timing; per checkpoint its progress and the hashes of its tensors."""
    kept = {}
    for path in checkpoints_of(run_dir):
        files = read_manifest(path).files
        tensors = {name: record.sha256 for name, record in files.items() if name.endswith(".safetensors")}
        kept[path.name] = read_metadata(path).progress, tensors
    return [{name: value for name, value in row.items() if name not in _TIMES} for row in rows_of(run_dir)], kept


def _ends(run_dir: Path, rank: int = 0) -> list[int]:
    return [int(line) for line in (run_dir / f"ends-{rank}.txt").read_text().split()]


@pytest.mark.parametrize("world", [1, 2])
def test_chunks_leave_the_same_rows_checkpoints_and_resumed_run(tmp_path: Path, world: int) -> None:
    stop = {"schedule": {"stop_after": 13}}
    once, many, term = (tmp_path / name for name in ("once", "many", "term"))
    for codes in run_ranks(
        _codes, world,
        (_mapping("toy", once), False),
        (_mapping("toy_chunks", many, **stop), False),
        (_mapping("toy_chunks", many), True),
    ):  # fmt: skip
        assert codes == [0, 75, 0]
    ends = [4, 5, 6, 8, 10, 12, 13, 15, 16, 18, 20, 23]
    assert _ends(many) == _ends(many, world - 1) == ends, "a chunk ends wherever something is due, and nowhere else"
    rows, checkpoints = _left(once)
    other_rows, other_checkpoints = _left(many)
    assert other_rows == rows
    assert [row["step"] for row in rows if "split" not in row] == [4, 8, 12, 16, 20, 23]
    assert other_checkpoints.pop("step-00000013")[0].samples == 13 * 8
    assert other_checkpoints == checkpoints
    # a signal between two looks: the run ends with the chunk, and continues as if nothing had been
    fault = {"fault": {"kind": "term", "step": 7, "rank": world - 1}}
    for codes in run_ranks(_codes, world, (_mapping("toy_chunks", term, **fault), False)):
        assert codes == [75]
    assert _ends(term)[-1] == 8
    for codes in run_ranks(_codes, world, (_mapping("toy_chunks", term), True)):
        assert codes == [0]
    again_rows, again_checkpoints = _left(term)
    assert again_rows == rows
    assert again_checkpoints.pop("step-00000008")[0].step == 8
    assert again_checkpoints == checkpoints


def test_a_profiled_step_is_a_chunk_of_its_own(tmp_path: Path) -> None:
    mapping = _mapping("toy_chunks", tmp_path / "run", schedule={"max_steps": 12})
    mapping["run"]["profile_step"] = 10
    mapping["checkpoint"]["every"] = 0
    assert run_ranks(_codes, 1, (mapping, False)) == [[0]]
    assert _ends(tmp_path / "run") == [4, 6, 8, 9, 10, 12]
    assert (tmp_path / "run" / "profile" / "step-00000010.json").is_file()
