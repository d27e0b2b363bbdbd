"""The RoBERTa encoder (Liu et al. 2019): post-LN Transformer layers over learned absolute positions."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.traits import traits
from capt.pretrain.models import layers
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.heads import WordEmbedding
from capt.pretrain.models.layers import EncoderLayer, Runs, autocast_dtype, checkpointed, dropout


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
        # All tokens have the first type: a constant, kept as a parameter (BERT's others as well) for exports.
        self.token_type = nn.Embedding(config.token_types, config.hidden)
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


class RobertaEncoder(Encoder):
    """Embeddings and layers; `initialise_weights` draws them as BERT's."""

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.vocab_size = config.hidden, config.classes
        self.max_positions, self.pad_id = config.max_positions, config.pad_id
        self.embeddings = Embeddings(config)
        self._compiled = traits().gpu_is_here() if config.compile == "auto" else config.compile
        self.layers = nn.ModuleList(
            checkpointed(EncoderLayer(config, self._compiled), config.activation_checkpointing)
            for _ in range(config.layers)
        )

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
        all tokens have the first one.
        """
        x = self.embeddings(tokens, padded)
        within: Runs | None = None
        if documents is not None and runs is not None and layers.prefers_runs(x, runs, self._compiled):
            within = layers.document_runs(documents, runs)
        mask = self._mask(tokens, padded, documents) if within is None else within
        autocast = autocast_dtype(x)
        for layer in self.layers[:-1]:
            x = layer(x, mask, None, autocast)
        # Runs have a query at every token; the last layer has them at `rows` alone, and needs a mask.
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
        """Forward FLOP of a sequence; see `RobertaConfig.flops`."""
        return self.config.flops(length, length if read is None else read)

    def _mask(self, tokens: Tensor, padded: bool, documents: Tensor | None) -> Tensor | None:
        if documents is not None:
            if padded:  # padding is a document of its own, so that no row of the mask is empty
                documents = documents.masked_fill(tokens == self.pad_id, -1)
            return (documents[:, :, None] == documents[:, None, :]).unsqueeze(1)
        return (tokens != self.pad_id)[:, None, None, :] if padded else None
