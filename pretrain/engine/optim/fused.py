"""Fused AdamW and LAMB of NVIDIA's apex and of DeepSpeed.

NVIDIA's apex is recognised by its compiled ``amp_C``; the PyPI project called ``apex`` is an unrelated web toolkit
and counts as absent.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from pretrain.base.errors import ConfigError
from pretrain.config.schema import EngineSection, OptimizerSection
from pretrain.engine.optim.settings import offloads_optimizer

Groups = list[dict[str, Any]]


def apex_available() -> bool:
    """True when NVIDIA's apex with its compiled kernels can be imported (and a GPU is there to run them)."""
    return torch.cuda.is_available() and importlib.util.find_spec("amp_C") is not None


def apex_optimizer(
    section: OptimizerSection, engine: EngineSection, groups: Groups
) -> tuple[torch.optim.Optimizer, str]:
    """apex's FusedAdam or FusedLAMB, and its name.

    Raises:
        ConfigError: apex is not installed, or the optimizer's state lies in host memory, where its kernels do not run.
    """
    if not apex_available():
        raise ConfigError(
            "optimizer.backend apex: NVIDIA's apex with compiled kernels (amp_C) and a GPU are not here; use a GPU "
            "image that carries it (docker/Dockerfile.gpu) or backend auto (never `pip install apex`: unrelated)"
        )
    if offloads_optimizer(engine):
        raise ConfigError(
            "optimizer.backend apex: its kernels run on a GPU, and engine.offload_optimizer keeps the state in host "
            "memory; use backend auto or deepspeed"
        )
    from apex import optimizers

    adam: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    if section.type == "lamb":  # apex would clip at 1.0 on its own
        return optimizers.FusedLAMB(groups, max_grad_norm=float("inf"), **adam), "apex FusedLAMB"
    return optimizers.FusedAdam(groups, **adam), "apex FusedAdam"


def deepspeed_optimizer(
    section: OptimizerSection, engine: EngineSection, groups: Groups
) -> tuple[torch.optim.Optimizer, str]:
    """DeepSpeed's FusedAdam, FusedLamb, or the Adam that runs on CPUs, and its name.

    Raises:
        ConfigError: LAMB without a GPU.
    """
    adam: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    if section.type == "lamb":
        from deepspeed.ops.lamb import FusedLamb

        if not torch.cuda.is_available():
            raise ConfigError("optimizer.backend deepspeed: DeepSpeed's LAMB needs a GPU; use backend torch or auto")
        return FusedLamb(groups, **adam), "DeepSpeed FusedLamb"
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if offloads_optimizer(engine) or not torch.cuda.is_available():
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **adam), "DeepSpeed CPUAdam"
    return FusedAdam(groups, adam_w_mode=True, **adam), "DeepSpeed FusedAdam"
