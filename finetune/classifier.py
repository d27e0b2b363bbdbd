"""The classifier that GLUE tasks are fine-tuned with, on any encoder."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from finetune.encoders import SentenceEncoder
from pretrain.models.dropout import dropout
from pretrain.models.roberta import initialise

_ACTIVATIONS = {"tanh": F.tanh, "gelu": F.gelu, "relu": F.relu}


class Classifier(nn.Module):
    """Dropout, dense, tanh, dropout, out on the first token's hidden state, as RoBERTa's classification head.

    fairseq's ``pooler_dropout`` is 0, transformers' ``classifier_dropout`` that of the hidden layers: ``probability``.
    Families whose own head in transformers has another activation get that one.
    """

    def __init__(self, encoder: SentenceEncoder, outputs: int, probability: float, activation: str = "tanh") -> None:
        super().__init__()
        self.encoder = encoder
        self.probability = probability
        self.dense = nn.Linear(encoder.hidden, encoder.hidden)
        self.out = nn.Linear(encoder.hidden, outputs)
        for layer in (self.dense, self.out):
            initialise(layer, 0.02)
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
