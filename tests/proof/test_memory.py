"""Local checkpoints: the model holds, each part of it is needed, and the code takes the model's order."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.run import run_job
from capt.pretrain.registry import TASKS
from tests.proof.memory import Rules, explore_memory
from tests.support import run_ranks

TASKS["toy"] = "tests.toy"
WORLD, STEPS = 3, 3


def test_one_lost_host_costs_no_step_and_no_left_future_comes_back() -> None:
    found = explore_memory(Rules(crashes=1, kills=2))
    assert found.problem == "", str(found)


@pytest.mark.parametrize(
    ("part", "rules", "problem"),
    [
        ("copies", Rules(crashes=0), "all hosts had step 1, and the job goes on from 0"),
        ("all before any removes", Rules(crashes=0), "all hosts had step 1, and the job goes on from 0"),
        ("life", Rules(crashes=0), "is put together of two"),
        ("claim", Rules(), "is put together of two"),
        ("new life", Rules(crashes=0), "is put together of two"),
    ],
)
def test_each_part_is_needed(part: str, rules: Rules, problem: str) -> None:
    found = explore_memory(rules._replace(without=part))
    assert problem in found.problem, str(found)


def _record(mapping: dict[str, Any]) -> list[tuple[float, str, int, tuple[int, ...]]]:
    """Record when this rank, a host, put a step in place (with the files of which ranks), and removed one."""
    from capt.pretrain.reliability.local import checkpointer, replicate

    logging.disable()
    rank = int(os.environ["RANK"])
    replicate._this_host = lambda: (f"host-{rank}", "")
    section = mapping["checkpoint"]["local"]
    section["dir"] = f"{section['dir']}/{rank}"
    seen: list[tuple[float, str, int, tuple[int, ...]]] = []
    real_put, real_remove = checkpointer.LocalSave._finish, checkpointer.remove_checkpoint

    def put(pending: checkpointer.LocalSave, files: dict[str, Any]) -> None:
        time.sleep(0.3 * (rank == 1))  # a host that is slower than the others
        there = {int(path.name.split("-")[2]) for path in pending.temporary.glob("model-weights-*.safetensors")}
        real_put(pending, files)
        seen.append((time.monotonic(), "has", int(pending.target.name[5:]), tuple(sorted(there))))

    def remove(path: Path) -> None:
        seen.append((time.monotonic(), "removes", int(path.name[5:]), ()))
        real_remove(path)

    checkpointer.LocalSave._finish, checkpointer.remove_checkpoint = put, remove  # type: ignore[method-assign]
    assert run_job(job_from_mapping(mapping, "test")) == 0
    return seen


def test_hosts_copy_have_and_remove_in_the_order_of_the_model(tmp_path: Path) -> None:
    mapping = {
        "task": {"type": "toy"},
        "run": {"dir": str(tmp_path / "run"), "tensorboard": False, "threads": 1},
        "batch": {"global": 6, "micro": 2},
        "schedule": {"max_steps": STEPS, "warmup_steps": 0},
        "optimizer": {"lr": 1e-2},
        "validate": {"every": 0},
        "checkpoint": {"every": 0, "local": {"every": 1, "dir": str(tmp_path / "memory")}},
    }
    seen = run_ranks(_record, WORLD, mapping)
    for rank, events in enumerate(seen):
        pair = tuple(sorted({rank, (rank - 1) % WORLD}))
        assert [event[1:] for event in events] == [("has", 1, pair), ("has", 2, pair), ("removes", 1, ())]
    last = max(events[1][0] for events in seen)
    assert all(events[2][0] > last for events in seen), "one host removed step 1 before all had step 2"
