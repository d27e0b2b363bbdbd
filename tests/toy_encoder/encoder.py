"""The module of the encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.heads import take_rows
from capt.pretrain.models.layers import EncoderLayer, WordEmbedding, autocast_dtype
from tests.toy_encoder.config import ToyConfig


class _Embeddings(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.word = WordEmbedding(config.classes, config.vocab_rows, config.hidden, config.pad_id)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.token_type = nn.Embedding(config.segments, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Words, positions from 0, the first segment."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.word(tokens) + self.position(positions) + self.token_type.weight[0])


class ToyEncoder(Encoder):
    """Post-LN layers on other embeddings."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.vocab_size = config.hidden, config.classes
        self.max_positions, self.pad_id = config.max_positions, config.pad_id
        self.embeddings = _Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))

    def forward(self, tokens, types=None, *, padded=False, documents=None, runs=None, rows=None):  # type: ignore[no-untyped-def]
        """See `Encoder.forward`."""
        assert documents is None
        mask = (tokens != self.pad_id)[:, None, None, :] if padded else None
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask, None, autocast_dtype(x))
        return x if rows is None else take_rows(x, rows)

    @property
    def word_embedding(self) -> nn.Embedding:
        """The table of words."""
        return self.embeddings.word

    def flops(self, length: float, read: float | None = None) -> float:
        """Count with the configuration."""
        return self.config.flops(length, length)
