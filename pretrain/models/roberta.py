"""The RoBERTa encoder (Liu et al. 2019): post-LN Transformer layers over learned absolute positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pretrain.base.errors import DataError
from pretrain.models import attention
from pretrain.models.attention import Runs, SelfAttention
from pretrain.models.config import RobertaConfig
from pretrain.models.dropout import dropout
from pretrain.models.encoder import Encoder
from pretrain.models.flops import encoder_flops
from pretrain.models.pooling import take_rows
from pretrain.models.vocabulary import WordEmbedding


class Embeddings(nn.Module):
    """Word + position + token-type embeddings, LayerNorm, dropout.

    Positions count real tokens from ``pad_id + 1``; padding has position ``pad_id`` (fairseq's ``make_positions``).
    """

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.pad_id = config.pad_id
        self.max_positions = config.max_positions
        self.dropout = config.dropout
        self.word = WordEmbedding(config.classes, config.vocab_rows, config.hidden, config.pad_id)
        self.position = nn.Embedding(config.position_rows, config.hidden, padding_idx=config.pad_id)
        # RoBERTa has one segment: a constant added to all tokens, kept as a parameter so that exports are lossless.
        self.token_type = nn.Embedding(1, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)

    def forward(self, tokens: Int[Tensor, "b L"], padded: bool) -> Float[Tensor, "b L h"]:
        """Input of the first layer. Raises ``DataError`` when the sequence is longer than the position table."""
        length = tokens.shape[1]
        if length > self.max_positions:
            raise DataError(f"a sequence of {length} tokens is longer than model.max_positions {self.max_positions}")
        if padded:
            real = tokens != self.pad_id
            positions = real.cumsum(1) * real + self.pad_id
        else:
            first = self.pad_id + 1
            positions = torch.arange(first, first + length, device=tokens.device)
        constant = self.token_type(torch.zeros(1, dtype=torch.long, device=tokens.device))
        x = self.word(tokens) + (self.position(positions) + constant)
        return dropout(self.norm(x), self.dropout, self.training)


class EncoderLayer(nn.Module):
    """A post-LN Transformer layer."""

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.ffn_in = nn.Linear(config.hidden, config.ffn)
        self.ffn_out = nn.Linear(config.ffn, config.hidden)
        self.ffn_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self._run = torch.compile(self._compute) if config.compile else self._compute

    def forward(
        self,
        x: Float[Tensor, "b L h"],
        mask: Bool[Tensor, "b 1 _ L"] | Runs | None,
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

    def _compute(self, x: Tensor, mask: Tensor | Runs | None, rows: Tensor | None) -> Tensor:
        # Cast once for queries, keys and values; autocast would do it for each.
        low = _to_autocast(x)
        at = x if rows is None else take_rows(x, rows)
        queries = low if rows is None else take_rows(low, rows)
        at = self.attention_norm(at + dropout(self.attention(queries, low, mask), self.dropout, self.training))
        y = self.ffn_out(F.gelu(self.ffn_in(at)))
        return self.ffn_norm(at + dropout(y, self.dropout, self.training))  # type: ignore[no-any-return]


class RobertaEncoder(Encoder):
    """Embeddings and layers; `initialise_weights` draws them as BERT's."""

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.vocab_size = config.hidden, config.classes
        self.max_positions, self.pad_id = config.max_positions, config.pad_id
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(_checkpointed(EncoderLayer(config), config) for _ in range(config.layers))

    def forward(
        self,
        tokens: Int[Tensor, "b L"],
        types: Int[Tensor, "b L"] | None = None,
        *,
        padded: bool = False,
        documents: Int[Tensor, "b L"] | None = None,
        runs: int | None = None,
        rows: Int[Tensor, "b r"] | None = None,
    ) -> Float[Tensor, "b _ h"]:
        """Final hidden states at all positions, or at ``rows`` only; see `Encoder.forward`.

        With ``rows`` the last layer computes queries, projections and feed-forward for those rows alone, since
        nothing else of its output is read; the result equals the full computation. ``types`` make no difference:
        RoBERTa has one segment.
        """
        x = self.embeddings(tokens, padded)
        within: Runs | None = None
        if documents is not None and runs is not None and attention.prefers_runs(x) and not self.config.compile:
            within = attention.document_runs(documents, runs)
        mask = self._mask(tokens, padded, documents) if within is None else within
        autocast = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
        for layer in self.layers[:-1]:
            x = layer(x, mask, None, autocast)
        if rows is not None and within is not None and documents is not None:
            mask = (documents.gather(1, rows)[:, :, None] == documents[:, None, :]).unsqueeze(1)
        elif rows is not None and isinstance(mask, Tensor) and mask.shape[2] > 1:
            mask = mask.take_along_dim(rows[:, None, :, None], dim=2)
        return self.layers[-1](x, mask, rows, autocast)  # type: ignore[no-any-return]

    @property
    def word_embedding(self) -> nn.Embedding:
        """The table of token embeddings."""
        return self.embeddings.word

    def flops(self, length: float, read: float | None = None) -> float:
        """Forward FLOP of a sequence; see `pretrain.models.flops.encoder_flops`."""
        return encoder_flops(self.config, length, length if read is None else read)

    def _mask(self, tokens: Tensor, padded: bool, documents: Tensor | None) -> Tensor | None:
        if documents is not None:
            if padded:  # padding is a document of its own, so that no row of the mask is empty
                documents = documents.masked_fill(tokens == self.pad_id, -1)
            return (documents[:, :, None] == documents[:, None, :]).unsqueeze(1)
        return (tokens != self.pad_id)[:, None, None, :] if padded else None


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


def _to_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _checkpointed(layer: EncoderLayer, config: RobertaConfig) -> nn.Module:
    if config.activation_checkpointing == "none":
        return layer
    from fairscale.nn.checkpoint import checkpoint_wrapper

    wrapped: Any = checkpoint_wrapper(layer, offload_to_cpu=config.activation_checkpointing == "offload")
    return wrapped  # type: ignore[no-any-return]
