"""Callbacks declare what they must follow, and a list in another order does not train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import job_from_mapping, load_job
from capt.pretrain.engine.callbacks import default_callbacks
from capt.pretrain.engine.loop import Callback, Run, check_order, train
from capt.pretrain.engine.task import Progress
from capt.pretrain.registry import TASKS
from tests.toy.task import ToyTask

TASKS["toy"] = "tests.toy"


def _callbacks(tmp_path: Path) -> dict[str, Callback]:
    job = load_job("capt_tiny", [f"run.dir={tmp_path}"])
    return {type(callback).__name__: callback for callback in default_callbacks(job)}


def test_the_default_order_is_the_declared_one(tmp_path: Path) -> None:
    callbacks = _callbacks(tmp_path)
    check_order(list(callbacks.values()))
    for name, callback in callbacks.items():
        assert set(callback.follows) <= set(callbacks), f"{name} follows a callback that does not exist"
    assert set(callbacks["Checkpointer"].follows) > {"Agreement", "SampleLedger", "Replicas"}
    assert set(callbacks["Metrics"].follows) == {"Throughput", "Stragglers"}, "their figures would be logged nowhere"


def test_any_two_that_are_swapped_are_refused(tmp_path: Path) -> None:
    callbacks = _callbacks(tmp_path)
    pairs = [(before, name) for name, callback in callbacks.items() for before in callback.follows]
    assert len(pairs) >= 10
    for before, name in pairs:
        names = list(callbacks)
        i, j = names.index(before), names.index(name)
        names[i], names[j] = names[j], names[i]
        with pytest.raises(ConfigError, match="it must follow it"):
            check_order([callbacks[each] for each in names])


def test_the_loop_refuses_before_any_callback_has_started(tmp_path: Path) -> None:
    class First(Callback):
        started = False

        def on_start(self, run: Any) -> None:
            First.started = True

    class Second(Callback):
        follows = ("First",)

    job = job_from_mapping({"task": {"type": "toy"}, "run": {"dir": str(tmp_path)}}, "test")
    task = ToyTask(job, tmp_path)
    run = Run(job, tmp_path, task, {}, Progress())
    with pytest.raises(ConfigError, match="callbacks: Second comes before First"):
        train(run, [Second(), First()])
    assert not First.started
