"""Chooses the engine that runs each module of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.schema import Job, OptimizerSection
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.engines.places import is_row_sharded
from capt.pretrain.engine.optim.build import freeze
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.rank import with_precision


def build_engines(
    modules: Mapping[str, nn.Module], job: Job, optimizers: Mapping[str, ModuleOptimizer] | None = None
) -> dict[str, Engine]:
    """Build one engine per module, in the mapping's order (the same on every rank).

    One rank at ZeRO 0 without fp16 and without DeepSpeed options of its own is plain PyTorch, and so is a module whose
    rows are shared out over the ranks (:mod:`capt.pretrain.engine.engines.places`); all else is DeepSpeed.

    Args:
        modules: what the task's ``build_modules`` returned.
        job: the job; its ``optimizer`` section is that of modules which ``optimizers`` does not name.
        optimizers: what the task's ``optimizers`` returned.

    Raises:
        ConfigError: a module has sparse gradients, or only some rows here, and its optimizer or ``engine`` has no place
            for them.
    """
    job, optimizers = with_precision(job), optimizers or {}
    assert not (unknown := optimizers.keys() - modules.keys()), f"optimizers() names no module: {unknown}"
    settings = {name: optimizers.get(name, ModuleOptimizer(job.optimizer)) for name in modules}
    if job.checkpoint.ema is not None:
        if any(each.average is not None for each in settings.values()):
            raise ConfigError(
                "checkpoint.ema: contrast.momentum keeps an average of the weights already; set one of them to null"
            )
        settings = {name: replace(each, average=job.checkpoint.ema) for name, each in settings.items()}
    engine = job.engine
    for name, module in modules.items():
        sharded = is_row_sharded(module)
        if sharded and (engine.precision == "fp16" or engine.deepspeed_extra):
            raise ConfigError(
                f"module {name} is sharded by rows, without DeepSpeed: set engine.precision=fp32 and leave "
                "engine.deepspeed_extra out"
            )
        section = settings[name].section
        if sharded and (section.layer_decay < 1 or section.freeze != "none"):
            raise ConfigError(f"module {name} is a table: leave optimizer.layer_decay and optimizer.freeze out")
        freeze(module, section)
        adapted = any(".lora_A." in parameter for parameter, _ in module.named_parameters())
        if (section.freeze != "none" or adapted) and engine.precision in ("fp16", "bf16_pure") and engine.zero_stage:
            key = "model.lora" if adapted else "optimizer.freeze"
            raise ConfigError(
                f"{key}: {engine.precision} at ZeRO 1 to 3 keeps frozen weights in 16 bits alone, which "
                "rounds them; set engine.precision=bf16, or fp16 with engine.zero_stage=0"
            )
        if sharded or any(isinstance(p, nn.Embedding | nn.EmbeddingBag) and p.sparse for p in module.modules()):
            _check_sparse(name, engine.zero_stage, section)
    alone = distributed.world_size() == 1 and engine.zero_stage == 0
    plain = alone and engine.precision != "fp16" and not engine.deepspeed_extra
    engines: dict[str, Engine] = {}
    for name, module in modules.items():
        if plain or is_row_sharded(module):
            engines[name] = LocalEngine(name, module, job, settings[name])
        else:
            from capt.pretrain.engine.engines.deepspeed import DeepSpeedEngine  # seconds to import

            engines[name] = DeepSpeedEngine(name, module, job, settings[name])
    return engines


def _check_sparse(name: str, zero_stage: int, section: OptimizerSection) -> None:
    """Raise ``ConfigError`` if a module with tables of sparse gradients cannot be updated."""
    problem = f"module {name} has tables with sparse gradients"
    if zero_stage:
        raise ConfigError(f"{problem}, which ZeRO would flatten: set engine.zero_stage=0, not {zero_stage}")
    if section.type == "sgd" and section.momentum:
        raise ConfigError(f"{problem}, which have no momentum: set optimizer.momentum=0, not {section.momentum}")
    if section.type not in ("adagrad", "sgd", "sparse_adam"):
        raise ConfigError(
            f"{problem}, and optimizer.type {section.type} has none: use adagrad, sparse_adam, or sgd without momentum"
        )
    if section.weight_decay:
        raise ConfigError(f"{problem}, which do not decay: set optimizer.weight_decay=0, not {section.weight_decay}")
