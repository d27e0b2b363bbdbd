"""In a step that is not logged the host never waits for the device: it reads no number there, and copies none to it.

Seen on a CPU, by the operators that would make it wait on a GPU.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.callbacks import default_callbacks
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.loop import Callback, Run, train
from capt.pretrain.engine.task import Progress
from capt.pretrain.registry import task_class
from tests.language import language_mapping
from tests.support import run_ranks

_LOG_EVERY = 4
WAITS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose",  # a number for the host
    "nonzero", "masked_select", "unique", "unique2", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "repeat_interleave", "argwhere", "nonzero_numpy",  # sizes that only the device knows
    "lift_fresh", "lift_fresh_copy",  # a number of the host, copied to the device from memory that is not pinned
}  # fmt: skip


class Waits(TorchDispatchMode):
    """Calls of each operator that waits."""

    METHODS = ("tolist", "cpu")  # which the dispatcher does not see on a CPU

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> Waits:
        for name in self.METHODS:
            setattr(Tensor, name, self._noting(name, getattr(Tensor, name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name in self.METHODS:
            setattr(Tensor, name, getattr(Tensor, name).original)

    def _noting(self, name: str, method: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._note(name)
            return method(*args, **kwargs)

        noted.original = method  # type: ignore[attr-defined]
        return noted

    def _note(self, name: str) -> None:
        ours = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and __file__ != f.filename]
        self.found.append(f"{name} at {ours[-1].filename}:{ours[-1].lineno}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in WAITS or (name.startswith("index") and _by_mask(args)):
            self._note(name)
        return func(*args, **(kwargs or {}))


def _by_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _Watcher(Callback):
    """First of the callbacks: from before a step until before the next one, all others are seen as well."""

    def __init__(self) -> None:
        self.steps: dict[int, list[str]] = {}
        self._mode: Waits | None = None

    def before_step(self, run: Run) -> None:
        self.leave()
        self._mode = Waits()
        self._mode.__enter__()
        self.steps[run.progress.step + 1] = self._mode.found

    def on_end(self, run: Run) -> None:
        self.leave()

    def leave(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


def _unwatched(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches are made in processes of the loader, which has none here."""
    while True:
        with _disable_current_modes():
            batch = next(batches)
        yield batch


def _waits(mapping: dict[str, Any]) -> dict[int, list[str]]:
    """Waits in each step of a run, with all its callbacks."""
    quiet_libraries(debug=False)
    for name in ("queue", "info_nce"):
        module: Any = importlib.import_module(f"capt.pretrain.contrast.{name}")
        module.is_readable = lambda values: False  # checks that a GPU is spared
    heads: Any = importlib.import_module("capt.pretrain.models.heads")
    heads.leaves_out_unused = lambda x: False  # so does a GPU
    job = job_from_mapping(mapping, "test")
    task = task_class(job.task.type)(job, job.run.dir)
    job.run.dir.mkdir(parents=True, exist_ok=True)
    engines = build_engines(task.build_modules(), task.job, task.optimizers())
    watcher, make = _Watcher(), task.build_batches
    task.build_batches = lambda progress: _unwatched(make(progress))  # type: ignore[method-assign]
    train(Run(task.job, job.run.dir, task, engines, Progress()), [watcher, *default_callbacks(task.job)])
    return watcher.steps


def _all_waits(mappings: list[dict[str, Any]]) -> list[dict[int, list[str]]]:
    return [_waits(mapping) for mapping in mappings]


_CASES = [(0, "fp32", "learned"), (1, "bf16", "inverted_triangle"), (2, "fp32", "learned")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[int, list[str]]]:
    folder = tmp_path_factory.mktemp("waits")
    mappings = [
        language_mapping(
            folder,
            run={"dir": str(folder / "-".join(map(str, case))), "log_every": _LOG_EVERY},
            engine={"zero_stage": case[0], "precision": case[1]},
            optimizer={"lr": 1e-3, "clip": 1.0},
            contrast={"queue": 41, "temperature": {"type": case[2]}},
            checkpoint={"every": 0},
        )
        for case in _CASES
    ]
    return dict(zip(_CASES, run_ranks(_all_waits, 2, mappings)[0], strict=True))


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_no_wait_outside_logged_steps(found: Any, case: Any) -> None:
    steps = found[case]
    assert len(steps) == 6
    for step, waits in steps.items():
        # The first step reads how many samples the start finds.
        if step % _LOG_EVERY and 1 < step < len(steps):
            assert not waits, f"step {step}"
        else:
            assert waits, "a logged step reads its figures: else this test sees nothing"
