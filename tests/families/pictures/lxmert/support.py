"""Small LXMERTs and batches for the tests of this room, with odd sizes so that no alignment hides a mistake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.model import LxmertModel, LxmertOutput

VOCABULARY, LENGTH, REGIONS, FEATURES, OBJECTS, ATTRIBUTES, ANSWERS = 97, 11, 7, 13, 17, 9, 23


def small_config(**fields: Any) -> LxmertConfig:
    """Numbers that are all different, so that no two axes can be confused."""
    sizes = {"size": "custom", "language_layers": 3, "vision_layers": 1, "cross_layers": 2, "hidden": 24, "heads": 3}
    known = {
        "ffn": 40, "vocab_size": VOCABULARY, "pad_id": 0, "max_positions": 19, "feature_size": FEATURES,
        "object_classes": OBJECTS, "attribute_classes": ATTRIBUTES, "answers": ANSWERS,
    }  # fmt: skip
    return LxmertConfig.model_validate({**sizes, **known, **fields})


def small_model(contrast: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> LxmertModel:
    """A model with every parameter away from its symmetric start (biases 0, LayerNorm 1)."""
    torch.manual_seed(seed)
    model = LxmertModel(small_config(**fields), contrast).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            if "position" in name or "token_type" in name or "encoder.words.word" in name:
                parameter[0] = 0.0  # padding, which is never trained
    return model


@dataclass(frozen=True)
class Pairs:
    """The tensors of a batch; ``inputs`` are the arguments of `LxmertModel.forward`."""

    tokens: Tensor
    corrupted: Tensor
    masked: Tensor
    labels: Tensor
    features: Tensor
    corrupted_features: Tensor
    boxes: Tensor
    present: Tensor | None
    padded: bool
    zeroed: Tensor

    @property
    def inputs(self) -> dict[str, Any]:
        """Keywords of `LxmertModel.forward`."""
        return {name: value for name, value in vars(self).items() if name != "zeroed"}


def pairs(
    n: int = 5, *, padded: bool = True, missing: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Pairs:
    """``padded``: sentence i ends in i padding tokens. ``missing``: picture i lacks its last i - 1 regions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, VOCABULARY, (n, LENGTH), generator=generator)
    tokens[:, 0] = 2
    present = torch.ones(n, REGIONS, dtype=torch.bool)
    for i in range(1, n):
        if padded:
            tokens[i, LENGTH - i :] = 0
        if missing:
            present[i, REGIONS - i + 1 :] = False
    chosen = torch.rand(n, LENGTH, generator=generator) < 0.2
    chosen[:, 0] = False
    chosen &= tokens != 0
    chosen[0, 3] = True
    masked = chosen.flatten().nonzero().squeeze(1)
    features = torch.randn(n, REGIONS, FEATURES, generator=generator, dtype=dtype) * present.unsqueeze(-1)
    zeroed = (torch.rand(n, REGIONS, generator=generator) < 0.3) & present
    boxes = torch.rand(n, REGIONS, 4, generator=generator, dtype=dtype) * present.unsqueeze(-1)
    return Pairs(
        tokens=tokens,
        corrupted=tokens.masked_fill(chosen, 4),
        masked=masked,
        labels=tokens.flatten()[masked],
        features=features,
        corrupted_features=features.masked_fill(zeroed.unsqueeze(-1), 0.0),
        boxes=boxes,
        present=present if missing else None,
        padded=padded,
        zeroed=zeroed,
    )


def total(out: LxmertOutput) -> Tensor:
    """A sum over everything that the model gives, so that its gradient reaches every parameter."""
    parts = [out.mlm.loss_sum, *(x.logsumexp(-1).sum() for x in (out.matching, out.objects, out.attributes, out.answers)
                                 if x is not None), out.features.square().sum()]  # fmt: skip
    if out.s is not None and out.s_hat is not None:
        parts.append((out.s @ out.s_hat.T).logsumexp(0).sum())
    return torch.stack([part.to(torch.float64) for part in parts]).sum()
