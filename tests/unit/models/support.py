"""Small models and batches for the tests of this room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.modernbert.config import ModernBertConfig

VOCABULARY, LENGTH = 97, 13


Family = type[RobertaConfig] | type[ModernBertConfig]


def small_config(family: Family = RobertaConfig, **fields: Any) -> Any:
    """Two layers of 32, with odd sizes elsewhere so that no alignment hides a mistake."""
    sizes = {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "ffn": 56}
    return family.model_validate({**sizes, "vocab_size": VOCABULARY, "max_positions": LENGTH, **fields})


def small_model(
    contrast: bool = True, dtype: torch.dtype = torch.float64, family: Family = RobertaConfig, **fields: Any
) -> CaptModel:
    """A model with every parameter away from its symmetric start (biases 0, LayerNorm 1)."""
    torch.manual_seed(0)
    model = CaptModel(small_config(family, **fields), contrast).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(n: int = 5, masked: int = 3, padded: bool = False, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, corrupted, positions, labels; ``padded``: row i ends in i padding tokens. The last slot is unused."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, VOCABULARY, (n, LENGTH), generator=generator)
    tokens[:, 0] = 0
    if padded:
        for i in range(1, n):
            tokens[i, LENGTH - i :] = 1
    order = [1 + torch.randperm(LENGTH - n - 1, generator=generator)[:masked] for _ in range(n)]
    positions = torch.stack(order)
    corrupted = tokens.scatter(1, positions, 4)
    labels = tokens.gather(1, positions)
    positions[-1, -1], labels[-1, -1] = 0, -100
    return tokens, corrupted, positions, labels


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter, by name."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor equal to ``tolerance``, relative to the largest element of the pair."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        scale = theirs[name].abs().max().clamp_min(1e-6)
        difference = float(((value - theirs[name]).abs().max() / scale).detach())
        assert difference <= tolerance, f"{name}: {difference}"


def train_step(model: CaptModel, autocast: bool = False, padded: bool = False) -> dict[str, Tensor]:
    """Gradients of MLM plus something contrastive in training mode, by ``backward`` (as checkpointing needs it)."""
    torch.manual_seed(7)
    tokens, corrupted, positions, labels = batch(padded=padded)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model.train()(tokens, corrupted, positions, labels, padded=padded)
    model.zero_grad()
    (out.mlm_loss_sum + (out.s @ out.s_hat.T).logsumexp(0).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
