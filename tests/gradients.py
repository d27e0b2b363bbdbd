"""Parameter gradients of a pretraining job's first steps, shared by tests that compare them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from capt.pretrain.config.load import job_from_mapping

STEPS = 3
"""A queue of 41 rows is half full at the second step of 16 samples, then wraps."""
_TASKS = {
    "capt_language": "capt.pretrain.language.task", "capt_vl": "capt.pretrain.vision_language.task",
    "rerank": "capt.finetune.rerank.task",
}  # fmt: skip


def gradients(
    mapping: dict[str, Any], *, seed: int | None = None, scale: float | None = None, steps: int = STEPS
) -> dict[str, Any]:
    """Gradients of each step (before clipping), by parameter name, and the metrics of each step.

    Args:
        mapping: the job.
        seed: of the random numbers that each step draws (dropout), on this rank; None leaves them as they are.
        scale: fp16's loss scale, which the gradients are divided by.
        steps: how many.
    """
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.task import Progress

    quiet_libraries(debug=False)
    job = job_from_mapping(mapping, "test")
    task = importlib.import_module(_TASKS[mapping["task"]["type"]]).TASK(job, Path(mapping["run"]["dir"]))
    engines = build_engines(task.build_modules(), job, task.optimizers())
    engine, taken = engines["model"], []
    update = engine.step

    def step_and_keep_gradients(loss: torch.Tensor | None = None) -> None:
        if engine.at_boundary:
            taken.append({name: p.float().numpy() / (scale or 1.0) for name, p in _whole(engine.module).items()})
        update(loss)

    engine.step = step_and_keep_gradients  # type: ignore[method-assign]
    progress, losses = Progress(), []
    batches = task.build_batches(progress)
    for step in range(steps):
        if scale is not None:
            engine.load_loss_scale_state({"scale": scale})
        if seed is not None:
            torch.manual_seed(seed + step)
        report = task.step(engines, next(batches), progress)
        losses.append({name: float(value) for name, value in report.items()})
        progress.step += 1
    return {"gradients": taken, "losses": losses}


def _whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name, in one collective: a collective costs more than the gradient of a small parameter."""
    from deepspeed.utils import safe_get_full_grad
    from torch.distributed.distributed_c10d import _coalescing_manager

    named = dict(module.named_parameters())
    groups = {getattr(p, "ds_process_group", getattr(p, "_dp_group", None)) for p in named.values()}
    (group,) = groups
    with _coalescing_manager(group=group):
        return {name: safe_get_full_grad(p) for name, p in named.items()}


def relative(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The norm of the difference of two gradients over that of the second."""
    difference = np.sqrt(sum(np.square(a[name].astype(np.float64) - b[name]).sum() for name in b))
    return float(difference / np.sqrt(sum(np.square(b[name].astype(np.float64)).sum() for name in b)))
