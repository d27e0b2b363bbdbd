"""Checks whether this machine computes in the precision that a job asks for."""

from __future__ import annotations

from pretrain.base.errors import ConfigError


def check_precision(precision: str) -> None:
    """Ask DeepSpeed's accelerator whether the device of this process computes in ``engine.precision``.

    Numbers of 16 bits that are emulated count as missing: such a job would run many times slower than in fp32.

    Raises:
        ConfigError: it does not.
    """
    if precision == "fp32":
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    gpu = accelerator.device_name() == "cuda"
    has = {"fp16": bool(accelerator.is_fp16_supported()), "bf16": bool(accelerator.is_bf16_supported())}
    if gpu:
        import torch

        has["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    if has[precision]:
        return
    fits = " or ".join(["fp32", *(name for name, supported in has.items() if supported)])
    raise ConfigError(
        f"engine.precision {precision}: this machine's {'GPU' if gpu else 'CPU'} has no {precision} units; use {fits}"
    )
