"""Optimizers by name, and a log line that says which implementation is used."""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import Any

import torch
from torch import nn

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.schema import EngineSection, OptimizerSection
from capt.pretrain.engine.optim.muon import MuonWithAdamW, muon_groups
from capt.pretrain.engine.optim.optimizers import Adagrad, BertAdam, Lamb, StableAdamW
from capt.pretrain.engine.optim.settings import offloads_optimizer

# Fused AdamW and LAMB of NVIDIA's apex and of DeepSpeed.
#
# NVIDIA's apex is recognised by its compiled ``amp_C``; the PyPI project called ``apex`` is an unrelated web toolkit
# and counts as absent.


Groups = list[dict[str, Any]]


def apex_available() -> bool:
    """True when NVIDIA's apex with its compiled kernels can be imported (and a GPU is there to run them)."""
    return torch.cuda.is_available() and importlib.util.find_spec("amp_C") is not None


def apex_optimizer(
    section: OptimizerSection, engine: EngineSection, groups: Groups
) -> tuple[torch.optim.Optimizer, str]:
    """apex's FusedAdam or FusedLAMB, and its name.

    Raises:
        ConfigError: apex is not installed, or the optimizer's state is in host memory, where its kernels do not run.
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


logger = logging.getLogger(__name__)

STATE_TENSORS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "bert_adam": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "stable_adamw": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer", "exp_avg", "exp_avg_sq"),
    "sparse_adam": ("exp_avg", "exp_avg_sq"),
}
"""Tensors as large as a parameter that each ``optimizer.type`` keeps for it: names in ``Optimizer.state``. Checkpoints
hold these, and the number of updates."""


def parameter_groups(module: nn.Module, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    r"""Matrices and embeddings decay; biases and LayerNorm parameters (vectors) do not. One group if nothing decays.

    With ``layer_decay`` :math:`d` below 1, layer l of L (from 1 on) has groups of its own, whose ``lr_scale`` is
    :math:`d^{L+1-l}` (Clark et al. 2020; Bao et al. 2022): the embeddings are l = 0, and all else is L + 1.

    Raises:
        ConfigError: the module has no layers with numbers, or several stacks of them.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if layer_decay == 1.0:
        return _by_decay([p for _, p in named], weight_decay)
    depths = layer_depths(module, "optimizer.layer_decay")
    top, groups = max(depths.values()), []
    for depth in sorted({depths[name] for name, _ in named}):
        own = _by_decay([p for name, p in named if depths[name] == depth], weight_decay)
        groups += [{**group, "lr_scale": layer_decay ** (top - depth)} for group in own]
    return groups


def _by_decay(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    if weight_decay == 0.0:
        return [{"params": parameters, "weight_decay": 0.0}]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


_LAYER = re.compile(r"(.*\blayers?)\.(\d+)\..*")
_BELOW = ("embedding", "relative_attention_bias", "encoder.LayerNorm")
"""Parts of names of what the lowest layer reads already. MPNet adds the second one to the scores of every layer,
DeBERTa's third one normalises the embeddings of relative positions."""


def layer_depths(module: nn.Module, key: str) -> dict[str, int]:
    """Return how deep each parameter lies: 0 in the embeddings, l in layer l (from 1 on), L + 1 after the L layers.

    Raises:
        ConfigError: the module has no layers with numbers, or several stacks of them; it begins with ``key``.
    """
    found = {name: _LAYER.fullmatch(name) for name, _ in module.named_parameters()}
    stacks = sorted({match[1] for match in found.values() if match})
    if len(stacks) != 1:
        have = f"several stacks of layers ({', '.join(stacks)})" if stacks else "no layers with numbers"
        raise ConfigError(
            f"{key}: it is for an encoder with one stack of layers, and this model has {have}; leave it out"
        )
    last = max(int(match[2]) for match in found.values() if match) + 1
    return {
        name: int(match[2]) + 1 if match else 0 if any(part in name for part in _BELOW) else last + 1
        for name, match in found.items()
    }


def freeze(module: nn.Module, section: OptimizerSection) -> None:
    """Freeze the parameters that ``optimizer.freeze`` names: they get no gradient.

    Raises:
        ConfigError: the module has not that number of layers, or nothing above them.
    """
    if section.freeze == "none":
        return
    depths = layer_depths(module, "optimizer.freeze")
    depth = 0 if section.freeze == "embeddings" else section.freeze
    if depth >= max(depths.values()):
        most = max(depths.values()) - 1
        raise ConfigError(f"optimizer.freeze {depth}: nothing is left to train; {most} layers may be frozen")
    for name, parameter in module.named_parameters():
        if depths[name] <= depth:
            parameter.requires_grad_(False)


def build_optimizer(section: OptimizerSection, engine: EngineSection, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``section`` describes, over ``module``'s parameters.

    ``backend: auto`` takes apex's fused AdamW and LAMB when they are importable and the state is on the GPU; else
    PyTorch's optimizers (its fused AdamW runs where the state lies), and this package's LAMB and Adagrad.

    Raises:
        ConfigError: the backend asked for by name is not available here, or cannot update an offloaded state; or the
            optimizer needs whole parameters, which ``engine.zero_stage`` cuts, or is for layers that are not there.
    """
    try:
        section.check_sharding(engine.zero_stage)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    has_apex_kernel = section.type in ("adamw", "lamb") and apex_available() and not offloads_optimizer(engine)
    if section.backend == "apex" or (section.backend == "auto" and has_apex_kernel):
        optimizer, implementation = apex_optimizer(section, engine, _groups(section, module))
    elif section.backend == "deepspeed":
        groups = _groups(section, module)
        optimizer, implementation = deepspeed_optimizer(section, engine, groups)
    else:
        optimizer, implementation = _torch_optimizer(section, engine, module)
    logger.info("optimizer: %s", implementation)
    return optimizer


def _groups(section: OptimizerSection, module: nn.Module) -> list[dict[str, Any]]:
    return parameter_groups(module, section.weight_decay, section.layer_decay)


def _torch_optimizer(
    section: OptimizerSection, engine: EngineSection, module: nn.Module
) -> tuple[torch.optim.Optimizer, str]:
    groups = _groups(section, module)
    adam: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    match section.type:
        case "lamb":
            return Lamb(groups, **adam), "LAMB (torch foreach)"
        case "stable_adamw":
            return StableAdamW(groups, **adam), "StableAdamW (torch foreach)"
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
            return muon, f"Muon for {len(matrices[0]['params'])} matrices, torch AdamW for the rest"
        case "sparse_adam":
            return torch.optim.SparseAdam(list(module.parameters()), **adam), "torch SparseAdam"
        case "adamw":
            # fp16's gradient scaler at ZeRO 0 would hand scaled gradients to a fused optimizer, past the clipping
            fused = not (engine.precision == "fp16" and engine.zero_stage == 0)
            return torch.optim.AdamW(groups, fused=fused, **adam), f"torch AdamW{' (fused)' if fused else ''}"
