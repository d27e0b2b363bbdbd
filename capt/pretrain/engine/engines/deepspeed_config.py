"""Makes the DeepSpeed configuration that a job means, as a pure function of the job. Imports no torch.

DeepSpeed accepts misspelt top-level keys silently and then trains with something else; so the configuration is
generated, ``engine.deepspeed_extra`` is checked against the keys DeepSpeed reads, and batch identities are computed.
"""

from __future__ import annotations

from typing import Any

from capt.pretrain.base.errors import ConfigError, did_you_mean, shown
from capt.pretrain.config.schema import EngineSection, Job, OptimizerSection
from capt.pretrain.engine.optim.settings import offloads_optimizer

_EXTRA_KEYS = {
    "activation_checkpointing",
    "aio",
    "comms_logger",
    "communication_data_type",
    "compile",
    "data_types",
    "dump_state",
    "flops_profiler",
    "fp16",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "timers",
    "torch_autocast",
    "wall_clock_breakdown",
    "zero_optimization",
}
_SECTIONS = {
    "activation_checkpointing",
    "aio",
    "comms_logger",
    "compile",
    "data_types",
    "flops_profiler",
    "fp16",
    "timers",
    "torch_autocast",
    "zero_optimization",
}
_OURS = {
    "train_batch_size": "batch.global",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.global and batch.micro",
    "gradient_clipping": "optimizer.clip",
    "optimizer": "optimizer.*",
    "scheduler": "schedule.*",
    "bf16": "engine.precision",
    "amp": "engine.precision",
}

_PRECISION = (("torch_autocast", "enabled"), ("torch_autocast", "dtype"), ("fp16", "enabled"))
"""Keys that say whether a loss is scaled, which decides who clips and what a norm that is not finite means."""

WIRE_TYPES = ("fp32", "bf16", "fp16")
"""Values of ``communication_data_type``: the type in which gradients are reduced."""

BUCKET = 25_000_000
"""Elements of a gradient bucket (100 MB in fp32; DeepSpeed holds two). Its default, 500 million, is more than a large
encoder has: one bucket, reduced when the backward pass is over, with nothing left to overlap with."""


def clips_here(engine: EngineSection) -> bool:
    """Return whether ``capt.pretrain.engine.engines.deepspeed`` measures the gradient norm and clips by it.

    DeepSpeed would read the norm on the host in every step. It must where the step hangs on it (fp16's loss scale),
    and where gradients are not on the device (offloading), or not in one place (ZeRO 3).
    """
    stage = engine.zero_stage
    scaled = engine.precision == "fp16" or "fp16" in engine.deepspeed_extra
    return stage == 0 or (stage in (1, 2) and not scaled and not offloads_optimizer(engine))


def deepspeed_config(job: Job, world: int, optimizer: OptimizerSection | None = None) -> dict[str, Any]:
    """Return the configuration passed to ``deepspeed.initialize`` for ``job`` on ``world`` ranks.

    ``optimizer`` is the section of a module that has one of its own; without it, ``job.optimizer``.

    Precision: parameters and optimizer state stay fp32; ``bf16`` runs the forward pass under autocast; ``fp16`` keeps
    fp16 parameters with an fp32 master copy and dynamic loss scaling (autocast with a gradient scaler at ZeRO 0);
    ``bf16_pure`` keeps bf16 parameters with an fp32 master copy, and sums gradients of micro-batches in bf16 at ZeRO 1.
    Gradients travel in fp32, in fp16 as such, unless ``communication_data_type`` names another. At ZeRO 1 and 2
    they are reduced while the backward pass still runs.

    Raises:
        ConfigError: the batch sizes do not fit ``world``, or ``engine.deepspeed_extra`` has an unknown key or one
            that another section owns.
    """
    _check(job.engine.deepspeed_extra)
    try:
        accumulation = job.accumulation(world)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    engine = job.engine
    zero: dict[str, Any] = {"stage": engine.zero_stage}
    if engine.zero_stage in (1, 2):
        zero |= {"overlap_comm": True, "reduce_bucket_size": BUCKET}
        # The norm is measured here instead; see `clips_here`.
        if clips_here(engine):
            zero["compute_grad_norm"] = False
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if engine.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_batch_size": job.micro_batch(world) * accumulation * world,  # it counts whole micro-batches
        "train_micro_batch_size_per_gpu": job.micro_batch(world),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0 if clips_here(engine) else (optimizer or job.optimizer).clip,
        "zero_optimization": zero,
        # Else DeepSpeed refuses optimizers that it does not know, and with offloading all but its own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Its own lines of progress, practically never.
        "steps_per_print": 1_000_000_000,
    }
    if engine.precision == "bf16":
        config["torch_autocast"] = _autocast("bfloat16")
    elif engine.precision == "fp16" and engine.zero_stage == 0:
        config["torch_autocast"] = _autocast("float16")
    elif engine.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000}
    elif engine.precision == "bf16_pure":
        config["bf16"] = {"enabled": True, "check_grad_overflow": False}  # the run ends at what is not finite
        config["communication_data_type"] = "fp32"
        if engine.zero_stage > 1:  # at stage 1 DeepSpeed would take another optimizer, with whole gradients
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merge(config, engine.deepspeed_extra)


def _autocast(dtype: str) -> dict[str, Any]:
    # "lower precision safe modules" are those whose gradients DeepSpeed would reduce in that type: sums over a thousand
    # ranks in bf16 are off by several percent. The operators that run in it are torch's choice, whatever is set here.
    return {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}


def _check(extra: dict[str, Any]) -> None:
    for key in extra:
        if key in _OURS:
            raise ConfigError(f"engine.deepspeed_extra.{key}: set {_OURS[key]} instead; there is one source for it")
        if key not in _EXTRA_KEYS:
            hint = did_you_mean(key, sorted(_EXTRA_KEYS), "valid:")
            raise ConfigError(f"engine.deepspeed_extra.{key}: DeepSpeed has no such key and would ignore it; {hint}")
        if key in _SECTIONS and not isinstance(extra[key], dict):
            raise ConfigError(f"engine.deepspeed_extra.{key}: {shown(extra[key])}: it is a section, {key}: {{...}}")
        if key not in _SECTIONS and not isinstance(extra[key], bool | int | float | str):
            raise ConfigError(f"engine.deepspeed_extra.{key}: {shown(extra[key])}: it is one value")
    for section, key in _PRECISION:
        if key in extra.get(section, {}):
            raise ConfigError(f"engine.deepspeed_extra.{section}.{key}: set engine.precision instead")
    if "stage" in extra.get("zero_optimization", {}):
        raise ConfigError("engine.deepspeed_extra.zero_optimization.stage: set engine.zero_stage instead")
    if extra.get("communication_data_type", "fp32") not in WIRE_TYPES:
        raise ConfigError(f"engine.deepspeed_extra.communication_data_type must be one of {', '.join(WIRE_TYPES)}")


def _merge(config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in extra.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged
