"""Low-rank adapters of an encoder, by peft: put in before training, merged before anything else reads the encoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.lora import LoraSection

_IN_A_LAYER = re.compile(r".*\.\d+\..*")
"""Names of modules inside the numbered layers; projections of the embeddings are outside."""
_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_lora(encoder: nn.Module, section: LoraSection) -> None:
    """Freeze ``encoder`` and put an adapter of ``section`` beside each of its chosen linear layers.

    B is 0, so that the first output is that of the encoder. The generator of random numbers moves on by what A draws.

    Raises:
        ConfigError: a target is not a linear layer inside the layers, there is none, or the rank is above theirs.
        ModuleNotFoundError: ``peft`` is not installed.
    """
    # Candidates, with the largest rank that each can have.
    linear = {
        name: min(part.weight.shape)
        for name, part in encoder.named_modules()
        if isinstance(part, nn.Linear) and _IN_A_LAYER.fullmatch(name)
    }
    for target in section.targets:
        if not any(_is_meant(name, target) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(
                f"model.lora.targets: no linear layer inside the layers is called {target}; there are {known}"
            )
    chosen = [name for name in linear if not section.targets or any(_is_meant(name, each) for each in section.targets)]
    if not chosen:
        raise ConfigError("model.lora.targets: this encoder has no linear layer inside numbered layers; leave lora out")
    if section.rank > (largest := max(linear[name] for name in chosen)):
        raise ConfigError(
            f"model.lora.rank {section.rank}: a matrix of this encoder has a rank of {largest} at most; set no more"
        )
    from peft import LoraConfig, inject_adapter_in_model  # an extra, and slow to import

    config = LoraConfig(
        r=section.rank, lora_alpha=section.alpha, lora_dropout=section.dropout, target_modules=chosen, bias="none"
    )
    inject_adapter_in_model(config, encoder)
    # Everything else of the encoder is frozen, its norms and embeddings too.
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(name.endswith((_A, _B)))


def _is_meant(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def merge_lora(encoder: nn.Module) -> None:
    """Make every matrix ``W + alpha / rank * B A``, and take the adapters out. All weights are trainable again."""
    from peft.tuners.lora import LoraLayer

    # A list: the modules change while they are gone through.
    for name, part in list(encoder.named_modules()):
        if isinstance(part, LoraLayer):
            layer: Any = part
            layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(encoder.get_submodule(parent), own, layer.get_base_layer())
    encoder.requires_grad_(True)


def merged_weights(state: Mapping[str, Tensor], section: LoraSection) -> dict[str, Tensor]:
    """Return the weights of an encoder with adapters as those of the encoder without; computed in fp32."""
    merged = {}
    for name, tensor in state.items():
        if name.endswith((_A, _B)):
            continue
        plain = name.replace(_BASE, ".")
        if plain != name and name.endswith(".weight"):
            layer = name.removesuffix(f"{_BASE}weight")
            product = state[layer + _B].float() @ state[layer + _A].float()
            tensor = (tensor.float() + section.alpha / section.rank * product).to(tensor.dtype)
        merged[plain] = tensor
    return merged
