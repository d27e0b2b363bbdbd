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
    Families whose own head in transformers has another activation get that one.
    """

    def __init__(self, encoder: Encoder, outputs: int, probability: float, activation: str = "tanh") -> None:
        super().__init__()
        self.encoder = FirstToken(encoder)
        self.reads_types = encoder.reads_types
        self.probability = probability
        self.dense = nn.Linear(encoder.hidden_size, encoder.hidden_size)
        self.out = nn.Linear(encoder.hidden_size, outputs)
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
        x = dropout(self.encoder(tokens, types, padded), self.probability, self.training)
        x = dropout(self._activation(self.dense(x)), self.probability, self.training)
        return self.out(x).float()  # type: ignore[no-any-return]
