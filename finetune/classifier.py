"""The classifier that tasks of labelled texts are fine-tuned with, on any encoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.layers import dropout, initialise_weights

_ACTIVATIONS = {"tanh": F.tanh, "gelu": F.gelu, "relu": F.relu}


class FirstToken(nn.Module):
    """The final hidden state of the first token (``<s>``, ``[CLS]``) of each sequence; no other output is computed.

    ``encoder`` is called ``model`` here because checkpoints name its parameters so.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.model = encoder

    def forward(
        self, tokens: Int[Tensor, "n L"], types: Int[Tensor, "n L"] | None, padded: bool
    ) -> Float[Tensor, "n h"]:
        """Hidden states of the first token; ``padded`` says whether any token is padding."""
        first = torch.zeros_like(tokens[:, :1])
        return self.model(tokens, types, padded=padded, rows=first)[:, 0]  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """Dropout, dense, tanh, dropout, out on the first token's hidden state, as RoBERTa's classification head.

    fairseq's ``pooler_dropout`` is 0, transformers' ``classifier_dropout`` that of the hidden layers: ``probability``.
    Families whose own head in transformers has another activation get that one, and those with a LayerNorm (ModernBERT)
    that head: dense, activation, LayerNorm, dropout, out.

    Args:
        encoder: the encoder below the head.
        outputs: columns of the logits.
        probability: dropout of the head.
        activation: ``tanh``, ``gelu`` or ``relu``.
        norm_eps: epsilon of the LayerNorm; None = there is none.
    """

    def __init__(
        self,
        encoder: Encoder,
        outputs: int,
        probability: float,
        activation: str = "tanh",
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.encoder = FirstToken(encoder)
        self.reads_types = encoder.reads_types
        self.probability = probability
        width, plain = encoder.hidden_size, norm_eps is None
        self.dense = nn.Linear(width, width, bias=plain)
        self.norm = None if norm_eps is None else nn.LayerNorm(width, eps=norm_eps, bias=False)
        self.out = nn.Linear(width, outputs)
        for layer in (self.dense, self.out):
            initialise_weights(layer, 0.02)
        self._activation = _ACTIVATIONS[activation]

    def forward(
        self, tokens: Int[Tensor, "n L"], types: Int[Tensor, "n L"] | None, padded: bool
    ) -> Float[Tensor, "n outputs"]:
        """Logits (of scores: score / 5), in fp32 also under autocast.

        Args:
            tokens: ids, padded on the right.
            types: token types, where the encoder reads them.
            padded: whether any token is padding.
        """
        x = self.encoder(tokens, types, padded)
        if self.norm is None:
            x = self._activation(self.dense(dropout(x, self.probability, self.training)))
        else:
            x = self.norm(self._activation(self.dense(x)))
        x = dropout(x, self.probability, self.training)
        return self.out(x).float()  # type: ignore[no-any-return]
