"""Fine-tuning on pictures: gradients of many ranks equal those of one, and a resumed run the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.config.load import job_from_mapping
from tests.support import run_ranks
from tests.visual import visual_mapping

_STEPS = 2


def _gradients(mapping: dict[str, Any]) -> dict[str, Any]:
    """Gradients of each step (before clipping), by parameter name, and the losses."""
    from deepspeed.utils import safe_get_full_grad

    from capt.finetune.visual.task import VisualFineTuning
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.task import Progress

    quiet_libraries(debug=False)
    task = VisualFineTuning(job_from_mapping(mapping, "test"), Path(mapping["run"]["dir"]))
    engines = build_engines(task.build_modules(), task.job, task.optimizers())
    engine, taken = engines["model"], []
    update = engine.step

    def step_and_keep_gradients(loss: Any = None) -> None:
        if engine.at_boundary:
            full = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
            taken.append({name: x.float().numpy().copy() for name, x in full.items() if x is not None})
        update(loss)

    engine.step = step_and_keep_gradients  # type: ignore[method-assign]
    progress, losses = Progress(), []
    batches = task.build_batches(progress)
    for _ in range(_STEPS):
        losses.append(float(task.step(engines, next(batches), progress)["loss"]))  # type: ignore[arg-type]
        progress.step += 1
    return {"gradients": taken, "losses": losses}


def _all_gradients(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_gradients(mapping) for mapping in mappings]


def _mapping(folder: Path, task: str, world: int, stage: int, accumulation: int) -> dict[str, Any]:
    return visual_mapping(
        folder,
        task,
        batch={"global": 8, "micro": 8 // world // accumulation},
        engine={"zero_stage": stage},
        optimizer={"lr": 1e-9},  # the weights stay, so that every step compares gradients at the same point
    )


_KINDS = [("vqa", 1, 2), ("nlvr2", 0, 1), ("nlvr2", 3, 2), ("gqa", 2, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("visual")


def test_gradients_of_two_ranks_are_those_of_one(folder: Path) -> None:
    """A loss that each rank averaged over its own rows alone would not pass."""
    alone = run_ranks(_all_gradients, 1, [_mapping(folder, task, 1, 0, n) for task, _, n in _KINDS])[0]
    ranks = run_ranks(_all_gradients, 2, [_mapping(folder, task, 2, *rest) for task, *rest in _KINDS])
    for i, kind in enumerate(_KINDS):
        for step in range(_STEPS):
            ours, theirs = ranks[0][i]["gradients"][step], alone[i]["gradients"][step]
            assert all(not ours[name].any() for name in ours.keys() - theirs.keys()), (
                "what nobody reads has no gradient"
            )
            norm = np.sqrt(sum(np.square(x.astype(np.float64)).sum() for x in theirs.values()))
            difference = np.sqrt(sum(np.square(ours[name].astype(np.float64) - x).sum() for name, x in theirs.items()))
            assert difference / norm < 3e-6, kind  # micro-batches of other widths: rounding, where 1e-6 is a few units
            mean = np.mean([rank[i]["losses"][step] for rank in ranks])
            assert mean == pytest.approx(alone[i]["losses"][step], rel=1e-5)
