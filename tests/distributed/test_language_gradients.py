"""Parameter gradients of MLM + CAPT under DeepSpeed equal those of one process given the same global micro-batches.

This is the test that the classic 1/world-size error of gathered contrastive losses cannot pass: the two losses would
then be mixed in another ratio on every world size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.config.load import job_from_mapping
from tests.language import language_mapping
from tests.support import run_ranks

_STEPS = 3  # the queue of 41 rows is half full, then wraps


def _gradients(mapping: dict[str, Any]) -> dict[str, Any]:
    """Gradients of each of three steps (before clipping), by parameter name."""
    from deepspeed.utils import safe_get_full_grad

    from pretrain.engine.engines import build_engines
    from pretrain.engine.quiet import quiet_libraries
    from pretrain.engine.task import Progress
    from pretrain.language.task import LanguageTask

    quiet_libraries(debug=False)
    job = job_from_mapping(mapping, "test")
    task = LanguageTask(job, Path(mapping["run"]["dir"]))
    engines = build_engines(task.build_modules(), job)
    engine, taken = engines["model"], []
    update = engine.step

    def step_and_keep_gradients() -> None:
        if engine.deepspeed.is_gradient_accumulation_boundary():
            named = engine.module.named_parameters()
            taken.append({name: safe_get_full_grad(p).float().numpy().copy() for name, p in named})
        update()

    engine.step = step_and_keep_gradients  # type: ignore[method-assign]
    progress, losses = Progress(), []
    batches = task.build_batches(progress)
    for _ in range(_STEPS):
        report = task.step(engines, next(batches), progress)
        losses.append({name: float(value) for name, value in report.items()})
        progress.step += 1
    return {"gradients": taken, "losses": losses}


def _mapping(folder: Path, world: int, stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    rows = 4  # of a global micro-batch
    return language_mapping(
        folder,
        batch={"global": rows * accumulation, "micro": rows // world},
        engine={"zero_stage": stage, "precision": precision},
        optimizer={"lr": 1e-9},  # the weights stay, so that every step compares gradients at the same point
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Path, dict[str, Any]]]:
    """One process, ZeRO 0."""
    folder = tmp_path_factory.mktemp("gradients")
    made = {}
    for precision in ("fp32", "bf16"):
        for accumulation in (1, 4):
            mapping = _mapping(folder, 1, 0, precision, accumulation)
            made[precision, accumulation] = (folder, run_ranks(_gradients, 1, mapping)[0])
    return made


def _relative(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    difference = np.sqrt(sum(np.square(a[name].astype(np.float64) - b[name]).sum() for name in b))
    return float(difference / np.sqrt(sum(np.square(b[name].astype(np.float64)).sum() for name in b)))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_fp32(references: Any, world: int, stage: int, accumulation: int) -> None:
    folder, reference = references["fp32", accumulation]
    ranks = run_ranks(_gradients, world, _mapping(folder, world, stage, "fp32", accumulation))
    for step in range(_STEPS):
        assert _relative(ranks[0]["gradients"][step], reference["gradients"][step]) < 1e-6
        for name in ("loss", "loss/mlm", "loss/capt", "accuracy/mlm"):
            mean = np.mean([rank["losses"][step][name] for rank in ranks])
            assert mean == pytest.approx(reference["losses"][step][name], rel=1e-5)


@pytest.mark.parametrize(("world", "stage", "accumulation"), [(2, 1, 4), (4, 2, 1), (2, 3, 4)])
def test_bf16(references: Any, world: int, stage: int, accumulation: int) -> None:
    folder, reference = references["bf16", accumulation]
    ranks = run_ranks(_gradients, world, _mapping(folder, world, stage, "bf16", accumulation))
    for step in range(_STEPS):
        assert _relative(ranks[0]["gradients"][step], reference["gradients"][step]) < 1e-2


def test_the_bound_notices_a_contrastive_gradient_of_the_wrong_scale(references: Any) -> None:
    """Halving the contrastive weight (the 1/W error at W = 2) changes gradients by far more than the bound."""
    folder, reference = references["fp32", 1]
    mapping = _mapping(folder, 1, 0, "fp32", 1)
    halved = run_ranks(_gradients, 1, {**mapping, "contrast": {**mapping["contrast"], "weight": 0.5}})[0]
    assert _relative(halved["gradients"][0], reference["gradients"][0]) > 1e-2
