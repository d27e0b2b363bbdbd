"""Small language jobs with ``contrast.momentum``, shared by its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.language.task import LanguageTask
from tests.language import language_mapping

DECAY = 0.9
GLOBAL = 8
_STEPS = 10


def momentum_mapping(
    folder: Path, stage: int, precision: str = "fp32", micro: int = 2, **contrast: Any
) -> dict[str, Any]:
    return language_mapping(
        folder,
        batch={"global": GLOBAL, "micro": micro},
        engine={"zero_stage": stage, "precision": precision},
        schedule={"max_steps": _STEPS, "warmup_steps": 1},
        # BERT's 0.02 makes all first representations nearly equal: any encoder would do
        model={"initializer_range": 0.2},
        contrast={"queue": 2 * GLOBAL * _STEPS, "momentum": DECAY, **contrast},
    )


def built(mapping: dict[str, Any]) -> tuple[LanguageTask, dict[str, Engine]]:
    quiet_libraries(debug=False)
    job = job_from_mapping(mapping, "test")
    task = LanguageTask(job, Path(mapping["run"]["dir"]))
    return task, build_engines(task.build_modules(), job, task.optimizers())


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """Copies of the weights in float64, of all ranks together."""
    from deepspeed.runtime.zero import GatheredParameters

    named = dict(engine.module.named_parameters())
    with GatheredParameters(list(named.values()), enabled=engine.zero_stage == 3):
        return {name: p.detach().double().clone() for name, p in named.items()}
