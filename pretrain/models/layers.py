"""The post-LN Transformer layer of BERT, RoBERTa and LXMERT, its activation checkpointing, and how weights begin."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pretrain.base.cache import use_own_compile_cache
from pretrain.models.attention import AttentionSizes, Packed, Runs, SelfAttention
from pretrain.models.dropout import dropout
from pretrain.models.pooling import take_rows
from pretrain.models.vocabulary import WordEmbedding


@runtime_checkable
class LayerSizes(AttentionSizes, Protocol):
    """What a configuration says of a layer."""

    @property
    def ffn(self) -> int:
        """Inner width of the feed-forward part."""

    @property
    def dropout(self) -> float:
        """Dropout of both parts' outputs."""

    @property
    def layer_norm_eps(self) -> float:
        """Added to the variance in LayerNorm."""


class EncoderLayer(nn.Module):
    """A post-LN Transformer layer."""

    def __init__(self, config: LayerSizes, compile: bool = False) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.ffn_in = nn.Linear(config.hidden, config.ffn)
        self.ffn_out = nn.Linear(config.ffn, config.hidden)
        self.ffn_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        if compile:
            use_own_compile_cache()
        self._run = torch.compile(self._compute) if compile else self._compute

    def forward(
        self,
        x: Float[Tensor, "b L h"],
        mask: Bool[Tensor, "b 1 _ L"] | Runs | Packed | None,
        rows: Int[Tensor, "b r"] | None,
        autocast: torch.dtype | None,
    ) -> Float[Tensor, "b _ h"]:
        """The layer's output at all positions, or at ``rows`` only.

        ``autocast`` is the precision to enter; fairscale's recomputation would otherwise enter CUDA's default (fp16).
        """
        if autocast is None:
            return self._run(x, mask, rows)
        with torch.autocast(x.device.type, autocast):
            return self._run(x, mask, rows)

    def attend(
        self,
        x: Float[Tensor, "b L h"],
        mask: Bool[Tensor, "b 1 _ L"] | Runs | Packed | None,
        rows: Int[Tensor, "b r"] | None,
    ) -> Float[Tensor, "b _ h"]:
        """The first half: attention, residual, LayerNorm."""
        # Cast once for queries, keys and values; autocast would do it for each.
        low = to_autocast(x)
        at = x if rows is None else take_rows(x, rows)
        queries = low if rows is None else take_rows(low, rows)
        return self.attention_norm(  # type: ignore[no-any-return]
            at + dropout(self.attention(queries, low, mask), self.dropout, self.training)
        )

    def feed_forward(self, x: Float[Tensor, "*rows h"]) -> Float[Tensor, "*rows h"]:
        """The second half, row by row: feed-forward network, residual, LayerNorm."""
        y = self.ffn_out(F.gelu(self.ffn_in(x)))
        return self.ffn_norm(x + dropout(y, self.dropout, self.training))  # type: ignore[no-any-return]

    def _compute(self, x: Tensor, mask: Tensor | Runs | Packed | None, rows: Tensor | None) -> Tensor:
        return self.feed_forward(self.attend(x, mask, rows))


def initialise_weights(module: nn.Module, std: float) -> None:
    """BERT's initialisation, in place: matrices N(0, ``std``), rows of padding and biases 0, LayerNorm the identity."""
    for part in module.modules():
        if isinstance(part, WordEmbedding):
            part.draw(std)
        elif isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, 0.0, std)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])


def to_autocast(x: Tensor) -> Tensor:
    """``x`` in the precision of the autocast that is in force, if one is."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The precision of the autocast that is in force on the device of ``x``."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None


def checkpointed(layer: nn.Module, kind: str) -> nn.Module:
    """``layer`` as ``model.activation_checkpointing`` wants it: ``none``, ``full`` or ``offload``."""
    if kind == "none":
        return layer
    from fairscale.nn.checkpoint import checkpoint_wrapper

    wrapped: Any = checkpoint_wrapper(layer, offload_to_cpu=kind == "offload")
    return wrapped  # type: ignore[no-any-return]
