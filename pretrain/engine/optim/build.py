"""Optimizers by name, and a log line that says which implementation is used."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from pretrain.base.errors import ConfigError
from pretrain.config.schema import EngineSection, OptimizerSection
from pretrain.engine.optim.adagrad import Adagrad
from pretrain.engine.optim.bert_adam import BertAdam
from pretrain.engine.optim.fused import apex_available, apex_optimizer, deepspeed_optimizer
from pretrain.engine.optim.lamb import Lamb
from pretrain.engine.optim.muon import MuonWithAdamW, muon_groups
from pretrain.engine.optim.settings import offloads_optimizer

logger = logging.getLogger(__name__)

STATE_TENSORS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "bert_adam": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer", "exp_avg", "exp_avg_sq"),
    "sparse_adam": ("exp_avg", "exp_avg_sq"),
}
"""What each ``optimizer.type`` keeps for a parameter, in every implementation: names in ``Optimizer.state``, of tensors
as large as the parameter. Checkpoints hold these, and the number of updates."""


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay; biases and LayerNorm parameters (vectors) do not. One group if nothing decays."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if weight_decay == 0.0:
        return [{"params": parameters, "weight_decay": 0.0}]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(section: OptimizerSection, engine: EngineSection, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``section`` describes, over ``module``'s parameters.

    ``backend: auto`` takes apex's fused AdamW and LAMB when they are importable and the state lies on the GPU; else
    PyTorch's optimizers (its fused AdamW runs where the state lies), and this package's LAMB and Adagrad.

    Raises:
        ConfigError: the backend asked for by name is not available here, or cannot update an offloaded state; or the
            optimizer needs whole parameters, which ``engine.zero_stage`` cuts.
    """
    try:
        section.check_sharding(engine.zero_stage)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    has_apex_kernel = section.type in ("adamw", "lamb") and apex_available() and not offloads_optimizer(engine)
    if section.backend == "apex" or (section.backend == "auto" and has_apex_kernel):
        optimizer, implementation = apex_optimizer(section, engine, parameter_groups(module, section.weight_decay))
    elif section.backend == "deepspeed":
        groups = parameter_groups(module, section.weight_decay)
        optimizer, implementation = deepspeed_optimizer(section, engine, groups)
    else:
        optimizer, implementation = _torch_optimizer(section, engine, module)
    logger.info("optimizer: %s", implementation)
    return optimizer


def _torch_optimizer(
    section: OptimizerSection, engine: EngineSection, module: nn.Module
) -> tuple[torch.optim.Optimizer, str]:
    groups = parameter_groups(module, section.weight_decay)
    adam: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    match section.type:
        case "lamb":
            return Lamb(groups, **adam), "LAMB (torch foreach)"
        case "bert_adam":  # which makes no difference between matrices and vectors
            everything = [{"params": [p for group in groups for p in group["params"]]}]
            return BertAdam(everything, weight_decay=section.weight_decay, **adam), "BERT's Adam (torch foreach)"
        case "adagrad":
            return Adagrad(groups, lr=section.lr, eps=section.eps), "Adagrad"
        case "sgd":
            return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum), "torch SGD"
        case "muon":
            matrices, others = muon_groups(module, section.weight_decay)
            muon = MuonWithAdamW(matrices, others, momentum=section.momentum, **adam)
            return muon, f"torch Muon for {len(matrices[0]['params'])} matrices, torch AdamW for the rest"
        case "sparse_adam":
            return torch.optim.SparseAdam(list(module.parameters()), **adam), "torch SparseAdam"
        case "adamw":
            # fp16's gradient scaler at ZeRO 0 would hand scaled gradients to a fused optimizer, past the clipping
            fused = not (engine.precision == "fp16" and engine.zero_stage == 0)
            return torch.optim.AdamW(groups, fused=fused, **adam), f"torch AdamW{' (fused)' if fused else ''}"
