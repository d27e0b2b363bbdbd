"""The ModernBERT encoder (Warner et al. 2024): pre-norm layers with rotary positions, GeGLU and local attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.traits import traits
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.heads import WordEmbedding
from capt.pretrain.models.layers import autocast_dtype, checkpointed, compile_whole, dropout
from capt.pretrain.models.modernbert.attention import Rotation, Sequences, lay_out, rotate, rotation
from capt.pretrain.models.modernbert.config import ModernBertConfig
from capt.pretrain.models.modernbert.initial import ResidualOutput


class Embeddings(nn.Module):
    """Word embeddings, LayerNorm, dropout."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.word = WordEmbedding(config.classes, config.vocab_rows, config.hidden, config.pad_id)
        self.norm = _norm(config)

    def forward(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n h"]:
        """Input of the first layer."""
        return dropout(self.norm(self.word(tokens)), self.dropout, self.training)


class Attention(nn.Module):
    """The matrices of multi-head attention: queries, keys and values in one, and the output."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.output = ResidualOutput(config.hidden, config.hidden)


class Layer(nn.Module):
    """A pre-norm layer: x + attention(norm(x)), then x + feed-forward(norm(x)).

    What is before and what is behind the attention is compiled, each by itself: the attention is a kernel of its own.
    """

    def __init__(self, config: ModernBertConfig, number: int, compile: bool) -> None:
        super().__init__()
        self.window = None if config.is_global(number) else config.window
        self.dropout = config.dropout
        self.output_dropout = config.attention_dropout if config.output_dropout is None else config.output_dropout
        self.attention_norm = _norm(config) if number else nn.Identity()  # the embeddings end in a norm
        self.attention = Attention(config)
        self.ffn_norm = _norm(config)
        self.ffn_in = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
        self.ffn_out = ResidualOutput(config.ffn, config.hidden)
        self._before, self._after = self._project, self._complete
        if compile:
            self._before, self._after = compile_whole(self._project), compile_whole(self._complete)

    def forward(
        self,
        x: Float[Tensor, "n h"],
        sequences: Sequences,
        turn: Rotation,
        rows: Int[Tensor, " m"] | None,
        autocast: torch.dtype | None,
    ) -> Float[Tensor, "_ h"]:
        """The layer's output at all rows, or at ``rows`` only.

        ``autocast`` is the precision to enter; fairscale's recomputation would otherwise enter CUDA's default (fp16).
        """
        with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            p = self.attention.dropout if self.training else 0.0
            attended = sequences.attend(self._before(x, turn), self.window, p)
            # What follows the attention is row by row, so rows that nobody reads are left out here.
            if rows is not None:
                x, attended = x.index_select(0, rows), attended.index_select(0, rows)
            return self._after(x, attended)

    def _project(self, x: Tensor, turn: Rotation) -> Tensor:
        qkv = self.attention.qkv(self.attention_norm(x))
        heads = self.attention.heads
        return rotate(qkv.view(-1, 3, heads, qkv.shape[-1] // (3 * heads)), turn)

    def _complete(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + dropout(self.attention.output(attended), self.output_dropout, self.training)
        value, gate = self.ffn_in(self.ffn_norm(x)).chunk(2, -1)
        return x + self.ffn_out(dropout(F.gelu(value) * gate, self.dropout, self.training))  # type: ignore[no-any-return]


class ModernBertEncoder(Encoder):
    """Embeddings, layers and a final norm over token rows without padding."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.vocab_size = config.hidden, config.classes
        self.max_positions, self.pad_id = config.max_positions, config.pad_id
        self.embeddings = Embeddings(config)
        compiled = traits().gpu_is_here() if config.compile == "auto" else config.compile
        self.layers = nn.ModuleList(
            checkpointed(Layer(config, number, compiled), config.activation_checkpointing)
            for number in range(config.layers)
        )
        self.norm = _norm(config)

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

        With ``rows`` the last layer computes what follows its attention for those rows alone. Hidden states of padding
        are zeros, or whatever belongs to a neighbour. ``types`` make no difference.
        """
        if tokens.shape[1] > self.max_positions:
            raise DataError(
                f"a sequence of {tokens.shape[1]} tokens is longer than model.max_positions {self.max_positions}"
            )
        config = self.config
        sequences = lay_out(tokens, self.pad_id, padded, documents, runs)
        x = self.embeddings(sequences.take(tokens))
        size, thetas = config.hidden // config.heads, (config.local_rope_theta, config.global_rope_theta)
        # Angles are the same in all layers of a kind, and are computed once.
        local, whole = (rotation(sequences.positions, size, theta) for theta in thetas)
        read = None if rows is None else sequences.find(rows)
        autocast = autocast_dtype(x)
        for number, layer in enumerate(self.layers):
            turn = whole if config.is_global(number) else local
            x = layer(x, sequences, turn, read if number == config.layers - 1 else None, autocast)
        x = self.norm(x)
        return sequences.spread(x) if rows is None else x.view(*rows.shape, -1)

    @property
    def word_embedding(self) -> nn.Embedding:
        """The table of token embeddings."""
        return self.embeddings.word

    def flops(self, length: float, read: float | None = None) -> float:
        """Forward FLOP of a sequence; see `ModernBertConfig.flops`."""
        return self.config.flops(length, length if read is None else read)


def _norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden, eps=config.layer_norm_eps, bias=False)
