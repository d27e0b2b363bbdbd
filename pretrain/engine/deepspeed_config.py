"""The DeepSpeed configuration that a job means, as a pure function of the job. Imports no torch.

DeepSpeed accepts misspelt top-level keys in silence and then trains with something else; so the configuration is
generated, ``engine.deepspeed_extra`` is checked against the keys DeepSpeed reads, and batch identities are computed.
"""

from __future__ import annotations

from typing import Any

from pretrain.config.schema import Job
from tokenizer.errors import ConfigError, instead_of, shown

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


def deepspeed_config(job: Job, world: int) -> dict[str, Any]:
    """The configuration passed to ``deepspeed.initialize`` for ``job`` on ``world`` ranks.

    Precision: parameters and optimizer state stay fp32; ``bf16`` runs the forward pass under autocast; ``fp16`` keeps
    fp16 parameters with an fp32 master copy and dynamic loss scaling (autocast with a gradient scaler at ZeRO 0).

    Raises:
        ConfigError: the batch sizes do not fit ``world``, or ``engine.deepspeed_extra`` has an unknown key or one
            that another section owns.
    """
    try:
        accumulation = job.accumulation(world)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    engine = job.engine
    zero: dict[str, Any] = {"stage": engine.zero_stage}
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if engine.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_batch_size": job.batch.global_,
        "train_micro_batch_size_per_gpu": job.batch.micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": job.optimizer.clip if engine.zero_stage else 0.0,  # ZeRO 0: pretrain.engine.engines clips
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if engine.precision == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif engine.precision == "fp16" and engine.zero_stage == 0:
        config["torch_autocast"] = {"enabled": True, "dtype": "float16"}
    elif engine.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000}
    return _merge(config, engine.deepspeed_extra)


def _merge(config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    for key in extra:
        if key in _OURS:
            raise ConfigError(f"engine.deepspeed_extra.{key}: set {_OURS[key]} instead; there is one source for it")
        if key not in _EXTRA_KEYS:
            hint = instead_of(key, sorted(_EXTRA_KEYS), "valid:")
            raise ConfigError(f"engine.deepspeed_extra.{key}: DeepSpeed has no such key and would ignore it; {hint}")
        if key in _SECTIONS and not isinstance(extra[key], dict):
            raise ConfigError(f"engine.deepspeed_extra.{key}: {shown(extra[key])}: it is a section, {key}: {{...}}")
        if key not in _SECTIONS and not isinstance(extra[key], bool | int | float | str):
            raise ConfigError(f"engine.deepspeed_extra.{key}: {shown(extra[key])}: it is one value")
    if "stage" in extra.get("zero_optimization", {}):
        raise ConfigError("engine.deepspeed_extra.zero_optimization.stage: set engine.zero_stage instead")
    merged = dict(config)
    for key, value in extra.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged
