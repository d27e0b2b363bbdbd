"""Chooses the engine that runs each module of a job."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from pretrain.config.schema import Job
from pretrain.engine import distributed
from pretrain.engine.engines.base import Engine
from pretrain.engine.engines.local import LocalEngine
from pretrain.engine.optim.settings import ModuleOptimizer


def build_engines(
    modules: Mapping[str, nn.Module], job: Job, optimizers: Mapping[str, ModuleOptimizer] | None = None
) -> dict[str, Engine]:
    """Build one engine per module, in the mapping's order (the same on every rank).

    One rank at ZeRO 0 without fp16 and without DeepSpeed options of its own is plain PyTorch; all else is DeepSpeed.

    Args:
        modules: what the task's ``build_modules`` returned.
        job: the job; its ``optimizer`` section is that of modules which ``optimizers`` does not name.
        optimizers: what the task's ``optimizers`` returned.
    """
    optimizers = optimizers or {}
    assert not (unknown := optimizers.keys() - modules.keys()), f"optimizers() names no module: {unknown}"
    settings = {name: optimizers.get(name, ModuleOptimizer(job.optimizer)) for name in modules}
    engine = job.engine
    alone = distributed.world_size() == 1 and engine.zero_stage == 0
    if alone and engine.precision != "fp16" and not engine.deepspeed_extra:
        return {name: LocalEngine(name, module, job, settings[name]) for name, module in modules.items()}
    from pretrain.engine.engines.deepspeed import DeepSpeedEngine  # seconds to import

    return {name: DeepSpeedEngine(name, module, job, settings[name]) for name, module in modules.items()}
